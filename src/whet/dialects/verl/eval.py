"""verl's keys of offline evaluation (main_eval): replies in a file, judged without a model by `whet eval FILE`."""

from __future__ import annotations

from whet.dialects.row import Values
from whet.dialects.verl.rules import Native, anywhere


def replies(v: Values) -> Native:
    return {"eval.offline.path": anywhere(v, "data.path")}


def answers(v: Values) -> Native:
    """The reference answer stands in the column's dict."""
    return {"eval.offline.answer": f"{v['data.reward_model_key']}.ground_truth"}
