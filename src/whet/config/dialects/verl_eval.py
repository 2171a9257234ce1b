"""verl's keys of offline evaluation (main_eval): replies in a file, judged without a model by `whet eval FILE`."""

from __future__ import annotations

from whet.config.dialects.key import Key, Values, derived, mapped, translated
from whet.config.dialects.verl_parts import judge
from whet.config.dialects.verl_rules import Native, anywhere, at_least, is_path

_JUDGED = "A function of yours; without a path verl's table by data source, as its document says."
_RAY = "There is no Ray."


def replies(v: Values) -> Native:
    return {"eval.offline.path": anywhere(v, "data.path")}


def answers(v: Values) -> Native:
    """The reference answer stands in the column's dict."""
    return {"eval.offline.answer": f"{v['data.reward_model_key']}.ground_truth"}


EVAL: tuple[Key, ...] = (
    derived("ray_init.num_cpus", at_least("ray_init.num_cpus", 1), default=None, reason=_RAY),
    derived("ray_init.timeline_json_file", is_path("ray_init.timeline_json_file"), default=None, reason=_RAY),
    translated(
        "data.path",
        replies,
        "eval.offline.path",
        default="/tmp/math_Qwen2-7B-Instruct.parquet",
        reason="A file on this machine.",
    ),
    mapped(
        "data.prompt_key",
        "eval.offline.prompt",
        default="prompt",
        reason="The column must be there; verl never reads it.",
    ),
    mapped(
        "data.response_key",
        "eval.offline.response",
        default="responses",
        reason="A list of replies a row; verl's test_score/SOURCE is eval/SOURCE/reward_mean.",
    ),
    mapped("data.data_source_key", "eval.offline.label", default="data_source"),
    translated(
        "data.reward_model_key",
        answers,
        "eval.offline.answer",
        default="reward_model",
        reason="A column of dicts with ground_truth in them.",
    ),
    translated("custom_reward_function.path", judge, "rewards.score.function", default=None, reason=_JUDGED),
    translated(
        "custom_reward_function.name",
        judge,
        "rewards.score.function",
        default="compute_score",
        reason=_JUDGED,
    ),
)
