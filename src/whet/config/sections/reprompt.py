"""Section about the prompts with which the reference scores rollouts in self-distillation."""

from __future__ import annotations

from whet.config.sections.base import Positive, Section


class RepromptConfig(Section):
    """Self-distillation (SDPO, arXiv:2601.20802): the reference scores each reply after a prompt that also shows a
    successful reply of the same group, or a text from the row. Templates and defaults are those of the authors' code
    and of TRL 1.16."""

    success_reward: float = 1.0
    """Smallest reward of a reply that is shown. (TRL: success_reward_threshold) The first such reply of a group is
    shown; a rollout without one, and without `feedback`, is not trained on."""
    own_success: bool = False
    """A successful rollout may be shown its own reply. false: it is shown the reply of another rollout. (TRL:
    dont_reprompt_on_self_success, negated)"""
    thoughts: bool = True
    """The shown reply includes its thoughts. false: only what follows them. (TRL: remove_thinking_from_demonstration,
    negated)"""
    feedback: str | None = None
    """Column of the row whose text is shown, e.g. a reference solution or the message of a failed test. (TRL:
    privileged_context) Default: no column."""
    template: str = "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n"
    """The new prompt: {prompt} stands for the text of the last message of the user (or the whole prompt if it is plain
    text), {solution} and {feedback} for the two templates below, or for nothing. (TRL: reprompt_template)"""
    solution_template: str = "\nCorrect solution:\n\n{reply}\n\n"
    """How the successful reply is shown. (TRL: solution_template)"""
    feedback_template: str = (
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback}\n\n"
    )
    """How the text of the column is shown. (TRL: feedback_template)"""
    max_prompt_tokens: Positive = 10240
    """Longest new prompt in tokens. (TRL: max_reprompt_len) A rollout with a longer one, or one that together with its
    reply exceeds the positions of the model, is not trained on and counted in train/reprompt_overlong; TRL cuts the
    prompt instead."""
