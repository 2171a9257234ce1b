"""Self-distillation (SDPO): what the reference is shown, what of it counts, and what the policy learns from it."""

from __future__ import annotations

import filecmp
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import whet
from encoded import encode_prompt
from forked import Started
from test_train_torch import CUT, pg_loss, random_groups
from tiny import VOCAB, tiny_model
from whet.algos.aggregate import weights
from whet.algos.distillation import Divergence, TopK
from whet.algos.groups import mask_shared_prefixes
from whet.batch import Batch, Loss, Outputs, at_sampled, pack, select
from whet.config.load import load
from whet.config.plan import plans
from whet.config.schema import OptimizerConfig, RepromptConfig, TokenizerConfig
from whet.data.reprompt import filled, open_reprompter
from whet.data.tokenizer import load_tokenizer
from whet.models import kernels
from whet.training.engine import FullKl
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import ConfigError, DataError, Group, Message, Rollout, Task, Turn

LETTERS = "".join(map(chr, range(32, 127))) + "\n"
CHAT = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    cfg = TokenizerConfig(build="chars", chat_template=CHAT)
    return load_tokenizer(cfg, model_path=None, texts=[LETTERS])


def group(
    tokenizer: PreTrainedTokenizerBase,
    replies: dict[str, float | None],
    prompt: str | tuple[Message, ...] = "q>",
    uid: int = 0,
    **extra: Any,
) -> Group:
    """Rollouts with these replies, each ended by the end token, and their rewards."""
    ids = encode_prompt(tokenizer, prompt)
    task = Task(uid=uid, source="s", prompt=prompt, token_ids=tuple(ids), extra=extra)
    out = []
    for index, (text, reward) in enumerate(replies.items()):
        reply = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        n, m = len(ids), len(reply)
        rollout = Rollout.one_strand(
            task=task, index=index, token_ids=[*ids, *reply], mask=[0] * n + [1] * m,
            logprobs=[0.0] * n + [-1.0] * m, sample_logprobs=[0.0] * n + [-1.0] * m,
            versions=[-1] * n + [3] * m, finish_reason="stop", text=text, reward=reward,
            turns=(Turn(start=n, end=n + m, finish_reason="stop"),),
        )  # fmt: skip
        out.append(rollout)
    return Group(task, tuple(out))


def reprompted(
    tokenizer: PreTrainedTokenizerBase, groups: list[Group], positions: int | None = None, **keys: Any
) -> tuple[Batch, dict[str, float]]:
    keys = {"template": "{prompt}{solution}{feedback}", "solution_template": "[{reply}]"} | keys
    keys = {"feedback_template": "({feedback})"} | keys
    reprompt = open_reprompter(RepromptConfig(**keys), tokenizer, positions=positions)
    return reprompt(pack(groups), groups)


def texts(tokenizer: PreTrainedTokenizerBase, batch: Batch) -> list[str]:
    """What the reference sees of each rollout, the sampled part in braces."""
    seen = batch.of_reference
    out = []
    for n in range(seen.rollouts):
        at_N = seen.rollout_N == n
        prompt, reply = (seen.token_ids_N[at_N & part].tolist() for part in (~seen.mask_N, seen.mask_N))
        out.append(f"{tokenizer.decode(prompt)}{{{tokenizer.decode(reply)}}}")
    return out


# ---------------------------------------------------------------- what the reference is shown


def test_each_rollout_is_shown_the_first_other_success_of_its_group(tokenizer) -> None:
    groups = [
        group(tokenizer, {"no": 0.0, "yes": 1.0, "yea": 1.0, "hm": None}),
        group(tokenizer, {"x": 0.9, "y": 0.0}, uid=1),
        group(tokenizer, {"one": 1.0, "z": 0.0}, uid=2),
    ]
    groups[0] = replace(groups[0], rollouts=groups[0].rollouts[:3])  # what is unscored is never packed
    batch, told = reprompted(tokenizer, groups)
    assert texts(tokenizer, batch) == [
        "q>[yes]{no<eos>}",
        "q>[yea]{yes<eos>}",
        "q>[yes]{yea<eos>}",
        "q>{x<eos>}",
        "q>{y<eos>}",
        "q>{one<eos>}",
        "q>[one]{z<eos>}",
    ]
    assert batch.count_R is not None
    assert batch.count_R.tolist() == [1, 1, 1, 0, 0, 0, 1]
    assert told == {
        "train/reprompted_frac": 4 / 7,
        "train/reprompt_overlong": 0.0,
        "group/success_frac": 2 / 3,
    }


def test_the_tokens_of_replies_are_kept(tokenizer) -> None:
    groups = [group(tokenizer, {"no": 0.0, "yes": 1.0, "yea": 1.0}), group(tokenizer, {"a": 1.0}, uid=1)]
    batch, _ = reprompted(tokenizer, groups)
    for part in (batch, select(batch, torch.tensor([0, 2])), select(batch, torch.tensor([3]))):
        seen = part.of_reference
        assert seen is not part
        assert torch.equal(seen.token_ids_N[seen.mask_N], part.token_ids_N[part.mask_N])
        assert torch.equal(seen.version_N[seen.mask_N], part.version_N[part.mask_N])
        numbers_M = torch.arange(seen.tokens, dtype=torch.float32)
        found_N = at_sampled(part, seen, numbers_M)
        assert torch.equal(found_N[part.mask_N], numbers_M[seen.mask_N])
        assert (found_N[~part.mask_N] == 0).all()


def test_a_rollout_may_be_shown_its_own_reply(tokenizer) -> None:
    groups = [group(tokenizer, {"yes": 1.0, "no": 0.0})]
    batch, told = reprompted(tokenizer, groups, own_success=True)
    assert texts(tokenizer, batch) == ["q>[yes]{yes<eos>}", "q>[yes]{no<eos>}"]
    assert told["train/reprompted_frac"] == 1.0
    batch, _ = reprompted(tokenizer, groups, success_reward=0.0)
    assert texts(tokenizer, batch) == ["q>[no]{yes<eos>}", "q>[yes]{no<eos>}"]


def test_a_prompt_that_is_too_long_is_left_out_and_counted(tokenizer) -> None:
    groups = [group(tokenizer, {"yes": 1.0, "no": 0.0, "maybe": 0.0})]
    # 'q>[yes]' has 7 tokens; after it 'no<eos>' ends at 10 and 'maybe<eos>' at 13
    for limits, counted in (
        ({"max_prompt_tokens": 7}, [0, 1, 1]),
        ({"max_prompt_tokens": 6}, [0, 0, 0]),
        ({"positions": 13}, [0, 1, 1]),
        ({"positions": 12}, [0, 1, 0]),
    ):
        batch, told = reprompted(tokenizer, groups, **limits)
        assert batch.count_R is not None
        assert batch.count_R.tolist() == counted
        assert told["train/reprompt_overlong"] == 2 - sum(counted)
        assert texts(tokenizer, batch)[0] == "q>{yes<eos>}"


def test_the_last_message_of_the_user_is_rewritten_and_a_reply_never_becomes_a_control_token(
    tokenizer,
) -> None:
    prompt = (
        Message("system", "s"),
        Message("user", "1"),
        Message("assistant", "2"),
        Message("user", "{reply} 3"),
    )
    groups = [group(tokenizer, {"<eos>{prompt}": 1.0, "no": 0.0}, prompt)]
    batch, _ = reprompted(tokenizer, groups)
    shown = texts(tokenizer, batch)[1]
    assert (
        shown
        == "<system>s<eos><user>1<eos><assistant>2<eos><user>{reply} 3[<eos>{prompt}]<eos><assistant>{no<eos>}"
    )
    seen = batch.of_reference
    ends = (seen.token_ids_N == tokenizer.eos_token_id) & (seen.rollout_N == 1) & ~seen.mask_N
    assert int(ends.sum()) == 4, "the fifth is text"


def test_the_beginning_of_a_reply_is_shown_with_it(tokenizer) -> None:
    prompt = (Message("user", "q"), Message("assistant", "So "))
    groups = [group(tokenizer, {"yes": 1.0, "no": 0.0}, prompt)]
    batch, _ = reprompted(tokenizer, groups)
    assert texts(tokenizer, batch)[1] == "<user>q[So yes]<eos><assistant>So {no<eos>}"


def test_thoughts_can_be_left_out(tokenizer) -> None:
    prompt = (Message("user", "q"),)
    groups = [group(tokenizer, {"<think>hm\n</think>\n\nyes": 1.0, "no": 0.0}, prompt)]
    batch, _ = reprompted(tokenizer, groups, thoughts=False)
    assert texts(tokenizer, batch)[1] == "<user>q[yes]<eos><assistant>{no<eos>}"
    batch, _ = reprompted(tokenizer, groups)
    assert "[<think>hm\n</think>\n\nyes]" in texts(tokenizer, batch)[1]


@pytest.mark.parametrize("thoughts", [True, False])
def test_a_prefix_without_a_loss_stays_a_part_of_the_reply(tokenizer, thoughts: bool) -> None:
    """groups.min_shared_prefix takes the beginnings that right and wrong replies share out of the loss."""
    whole = group(tokenizer, {"so yes": 1.0, "so no": 0.0}, (Message("user", "q"),))
    groups = [mask_shared_prefixes(whole, 3)]
    batch, _ = reprompted(tokenizer, groups, thoughts=thoughts, own_success=True)
    assert texts(tokenizer, batch) == [
        "<user>q[so yes]<eos><assistant>so {yes<eos>}",
        "<user>q[so yes]<eos><assistant>so {no<eos>}",
    ]


def test_a_column_is_shown_also_where_no_reply_is_right(tokenizer) -> None:
    groups = [
        group(tokenizer, {"yes": 1.0, "no": 0.0}, hint="h"),
        group(tokenizer, {"a": 0.0}, uid=1, hint="i"),
        group(tokenizer, {"b": 0.0}, uid=2, hint=None),
        group(tokenizer, {"c": 0.0}, uid=3, hint=" "),
    ]
    batch, told = reprompted(tokenizer, groups, feedback="hint")
    assert texts(tokenizer, batch) == [
        "q>(h){yes<eos>}",
        "q>[yes](h){no<eos>}",
        "q>(i){a<eos>}",
        "q>{b<eos>}",
        "q>{c<eos>}",
    ]
    assert told["train/reprompted_frac"] == 3 / 5
    with pytest.raises(
        DataError, match=r"Task 0 .* has no column 'hints' .*further columns of the row: hint"
    ):
        reprompted(tokenizer, groups, feedback="hints")
    with pytest.raises(DataError, match=r"column 'hint' .* is a int, expected a text or null"):
        reprompted(tokenizer, [group(tokenizer, {"a": 0.0}, hint=3)], feedback="hint")


def test_a_prompt_without_a_message_of_the_user_is_refused(tokenizer) -> None:
    groups = [group(tokenizer, {"yes": 1.0, "no": 0.0}, (Message("system", "s"),))]
    with pytest.raises(DataError, match="no message of the user"):
        reprompted(tokenizer, groups)


def test_values_are_never_read_as_places() -> None:
    assert filled("{a}{prompt}{solution}", {"prompt": "{solution}", "solution": "{prompt}"}) == (
        "{a}{solution}{prompt}"
    )


# ---------------------------------------------------------------- in the engine


def two_prompts(seed: int = 0) -> Batch:
    """Rollouts that the reference sees after other, mostly longer prompts."""
    groups = random_groups(seed=seed)
    gen = torch.Generator().manual_seed(seed)

    def other(rollout: Rollout) -> Rollout:
        strand = rollout.strand
        n, begin = int(torch.randint(1, 20, (1,), generator=gen)), strand.prompt_tokens
        ids = torch.randint(2, VOCAB, (n,), generator=gen).tolist()
        mask = [*[0] * n, *strand.mask[begin:]]
        return Rollout.one_strand(
            task=rollout.task, index=rollout.index, token_ids=[*ids, *strand.token_ids[begin:]], mask=mask,
            logprobs=[0.0] * len(mask), sample_logprobs=[0.0] * len(mask), versions=[0 if m else -1 for m in mask],
            finish_reason="stop", reward=rollout.reward,
        )  # fmt: skip

    after = [Group(g.task, tuple(other(r) for r in g.rollouts)) for g in groups]
    batch = pack(groups)
    adv_N = torch.randn(batch.tokens, generator=gen)
    count_R = torch.tensor([float(n % 4 != 2) for n in range(batch.rollouts)])
    batch = replace(batch, adv_N=adv_N, reprompted=pack(after), count_R=count_R)
    return replace(batch, weight_N=weights(batch, "token-mean", norm_tokens=8))


def engines(cut: MicroBatchPolicy, of: Divergence) -> tuple[TorchEngine, TorchEngine]:
    ops = kernels.load("auto")
    policy = TorchEngine(tiny_model(seed=0), ops, cut=cut, optimizer=OptimizerConfig(lr=1e-2), total_steps=4)
    teacher = TorchEngine(tiny_model(seed=1), ops, cut=cut)
    policy.full_kl = FullKl(2.0, teacher, of)
    return policy, teacher


def nothing(batch: Batch, out: Outputs) -> Loss:
    assert out.logp_N is not None
    return Loss(0 * out.logp_N)


def logits(model: Any, batch: Batch) -> Tensor:
    """[A, V] before each sampled token, rollout by rollout, by transformers alone."""
    rows = []
    for n in range(batch.rollouts):
        at_N = batch.rollout_N == n
        ids, mask = batch.token_ids_N[at_N], batch.mask_N[at_N]
        rows.append(model(input_ids=ids[None]).logits[0, :-1][mask[1:]])
    return torch.cat(rows)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_loss_compares_the_reply_after_both_prompts(beta: float) -> None:
    """By transformers and autograd, one rollout at a time."""
    batch = two_prompts()
    policy, teacher = engines(MicroBatchPolicy(), Divergence(beta))
    p = logits(policy.module, batch).log_softmax(-1)
    q = logits(teacher.module, batch.of_reference).detach().log_softmax(-1)
    if beta == 0:
        kl = (q.exp() * (q - p)).sum(-1)
    elif beta == 1:
        kl = (p.exp() * (p - q)).sum(-1)
    else:
        m = torch.log(beta * q.exp() + (1 - beta) * p.exp())
        kl = (beta * q.exp() * (q - m) + (1 - beta) * p.exp() * (p - m)).sum(-1)
    assert batch.weight_N is not None
    assert batch.count_R is not None
    counted_N = batch.count_R[batch.rollout_N][batch.mask_N]
    expected = 2.0 * (kl * counted_N).sum() / counted_N.sum()
    head = policy.module.model.layers[0].mlp.down_proj.weight
    (true,) = torch.autograd.grad(expected, head)
    before = head.detach().clone()
    policy.optimizer = None
    ours = TorchEngine(
        tiny_model(seed=0),
        kernels.load("auto"),
        cut=MicroBatchPolicy(),
        optimizer=OptimizerConfig(name="sgd", lr=1.0, momentum=0.0, weight_decay=0.0, max_grad_norm=1e9),
        total_steps=4,
    )
    ours.full_kl = policy.full_kl
    told = ours.update(batch, nothing)
    assert told["loss"] == pytest.approx(float(expected.detach()), rel=1e-4)
    moved = ours.module.model.layers[0].mlp.down_proj.weight.detach() - before
    torch.testing.assert_close(moved, -true, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("of", [Divergence(0.5), Divergence(0.5, TopK(4, "policy", "tail"))])
def test_no_cut_changes_it(of: Divergence) -> None:
    def update(cut: MicroBatchPolicy, batch: Batch) -> dict[str, float]:
        return engines(cut, of)[0].update(batch, pg_loss)

    batch = two_prompts()
    whole = update(MicroBatchPolicy(), batch)
    assert whole["kl_loss_nats"] > 0.01
    for cut in (
        MicroBatchPolicy(max_tokens=None, max_rollouts=1),
        MicroBatchPolicy(max_tokens=None, max_rollouts=5),
        MicroBatchPolicy(max_tokens=40),
        MicroBatchPolicy(share_prompts=False),
    ):
        assert update(cut, batch) == pytest.approx(whole, rel=1e-4)
    alone = update(MicroBatchPolicy(), replace(batch, reprompted=None))
    assert alone["kl_loss_nats"] != pytest.approx(whole["kl_loss_nats"], rel=1e-2)


def test_log_probs_of_the_reference_are_those_after_its_prompts() -> None:
    batch = two_prompts()
    _, teacher = engines(CUT, Divergence())
    seen = batch.of_reference
    found_N = at_sampled(batch, seen, teacher.forward(seen, "logprobs"))
    said_AV = logits(teacher.module, seen).log_softmax(-1)
    expected_A = said_AV.gather(1, seen.token_ids_N[seen.mask_N][:, None])[:, 0].detach()
    torch.testing.assert_close(found_N[batch.mask_N], expected_A, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- refused

BASE: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"max_prompt_tokens": 8, "train": [{"rows": [{"prompt": "a>", "answer": "b"}]}]},
    "rewards": {"right": {"function": "exact"}},
    "rollout": {"group_size": 4, "sampling": {"max_tokens": 4}},
    "train": {"steps": 2, "tasks_per_step": 2},
    "algorithm": {"name": "sdpo"},
}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["algorithm.reprompt.template='{prompt} again'"],
            r"reprompt.template: got a text without \{solution\}",
        ),
        (["algorithm.reprompt.solution_template=text"], r"solution_template: got a text without \{reply\}"),
        (
            ["algorithm.reprompt={feedback: hint, template: '{prompt}{solution}'}"],
            r"reprompt.template: got a text without \{feedback\}",
        ),
        (["algorithm.reprompt.feedback_template='{feedback}!'"], r"reprompt\.feedback is not given"),
        (["algorithm.name=grpo", "algorithm.reprompt.own_success=true"], "have a teacher"),
    ],
)
def test_what_cannot_work_or_has_no_effect_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plans(load(None, overrides, BASE))
    with pytest.raises(ConfigError, match=r"algorithm\.name=sdpo needs rewards"):
        plans(load(None, [], {key: value for key, value in BASE.items() if key != "rewards"}))


# ---------------------------------------------------------------- in a run

KEY = dict(zip("abcdefgh", "cahbgdfe", strict=True))
COPIES = [{"prompt": f"{p}>{x}>", "response": x} for p in KEY for x in KEY]
GUESSES = [{"prompt": f"{p}>", "response": x} for p in KEY for x in KEY]
TASKS = [{"prompt": f"{p}>", "answer": x} for p, x in KEY.items()]
SCRATCH = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def settings(run_dir: Path, *, steps: int, **sections: Any) -> dict[str, Any]:
    """SFT teaches a model to repeat a letter that its prompt shows, and to guess without one; then SDPO."""
    copying = {
        "name": "copy",
        "algorithm": {"name": "sft"},
        "data": {
            "max_prompt_tokens": 8,
            "train": [
                {"name": "copies", "rows": COPIES, "weight": 3.0},
                {"name": "guesses", "rows": GUESSES},
            ],
        },
        "train": {
            "steps": steps,
            "tasks_per_step": 24,
            "optimizer": {"lr": 1e-2, "schedule": {"type": "linear"}},
        },
        "rollout": {"sampling": {"max_tokens": 3}},
    }
    sdpo = {
        "name": "sdpo",
        "algorithm": {
            "name": "sdpo",
            "loss": {"top_k": 4},
            "reprompt": {"template": "{prompt}{solution}", "solution_template": "{reply}>"},
        },
        "data": {"max_prompt_tokens": 8, "train": [{"rows": TASKS}]},
        "rewards": {"right": {"function": "exact"}},
        "rollout": {"group_size": 16, "sampling": {"max_tokens": 3}},
        "train": {"steps": 24, "tasks_per_step": 8, "optimizer": {"lr": 1e-2}},
    }
    return {
        "run_dir": str(run_dir),
        "model": {"scratch": SCRATCH},
        "tokenizer": {"build": "chars"},
        "machine": {"threads": 1},
        "track": {"trackers": ["jsonl"]},
        "checkpoint": {"interval": 0, "export": False},
        "stages": [copying, sdpo | sections],
    }


def test_the_policy_learns_what_it_does_right_once(tmp_path: Path) -> None:
    """The teacher is the start model, which repeats what it is shown; so small a policy forgets how to."""
    result = whet.train(**settings(tmp_path / "run", steps=120))
    rows = [m for m in result.metrics if "train/reprompted_frac" in m]
    rewards = [m["reward/mean"] for m in rows]
    assert sum(rewards[:3]) / 3 < 0.25, "a model that guesses one of eight letters"
    assert sum(rewards[-3:]) / 3 > 0.4
    assert all(m["train/skipped_rollouts_frac"] == 1 - m["train/reprompted_frac"] for m in rows)


def test_groups_without_a_success_teach_nothing(tmp_path: Path) -> None:
    """No reply is right: the gradient is 0, and the weights stay."""
    given = settings(tmp_path / "run", steps=1, train={"steps": 2, "tasks_per_step": 4})
    given["stages"][1]["data"] = {
        "max_prompt_tokens": 8,
        "train": [{"rows": [{"prompt": "a>", "answer": "zzzz"}]}],
    }
    rows = [m for m in whet.train(**given).metrics if "train/reprompted_frac" in m]
    assert len(rows) == 2
    for m in rows:
        assert m["train/reprompted_frac"] == m["group/success_frac"] == m["train/grad_norm"] == 0.0


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "sdpo"},
        pytest.param({"name": "sdpo", "loss": {"divergence": "k2"}}, marks=pytest.mark.sweep),
        pytest.param({"name": "distill"}, marks=pytest.mark.sweep),
    ],
)
def test_a_killed_run_goes_on_to_the_same_end(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    """The reference, which moves, is in the checkpoint."""
    reprompt = {"template": "{prompt}{solution}", "solution_template": "{reply}>"}
    train = {"steps": 12, "tasks_per_step": 8, "minibatches": 2, "optimizer": {"lr": 5e-3}}

    def given(name: str) -> dict[str, Any]:
        reference = {"reset_interval": 1, "mixup_alpha": 0.05}
        parts = {"algorithm": algorithm | {"reprompt": reprompt}, "train": train, "reference": reference}
        values = settings(tmp_path / name, steps=2, **parts)
        return values | {"checkpoint": {"interval": 2, "export": False}}

    whet.train(**given("whole"))
    config = tmp_path / "broken.yaml"
    config.write_text(yaml.safe_dump(given("broken")))
    process = Started("train", str(config))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    metrics, deadline = broken / "metrics.jsonl", time.monotonic() + 60
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 6:
        assert process.poll() is None, process.text()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert metrics.read_bytes().count(b"\n") < 14
    whet.train(**given("broken"))
    names = sorted(str(p.relative_to(whole)) for p in whole.rglob("*.safetensors"))
    assert any("reference" in name for name in names)
    assert filecmp.cmpfiles(whole, broken, ["metrics.jsonl", *names], shallow=False)[1:] == ([], [])
