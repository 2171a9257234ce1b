"""Trinity's selectors: the order in which the rows of a taskset are drawn."""

from __future__ import annotations

from collections.abc import Sequence

from whet.config.faults import shown
from whet.dialects.row import NotSupportedYet
from whet.dialects.trinity.values import Native, Own, arguments, functions, given, known_as, selector
from whet.types import ConfigError, Json


def _by_difficulty(own: Own, at: str) -> Native:
    """BOTS: the settings of its selector, which Trinity finds in kwargs."""
    features = own["feature_keys"] or []
    if not isinstance(features, list) or len(features) != 2:
        raise ConfigError(
            f"{at}.feature_keys: got {shown(features)}, expected two columns: the success rates of a weaker and of a "
            "stronger model"
        )
    bots = functions("selector")["difficulty_based"]
    kwargs = arguments({f"{at}.kwargs.*": own["kwargs.*"]}, f"{at}.kwargs", bots.defaults)
    told = {f"data.order.{here}": kwargs[key] for key, here in bots.natives.items()}
    return {"data.order": "adaptive", **told, "data.order.columns": features, "data.seed": own["seed"]}


def order_of_sets(sets: Sequence[tuple[Own, str]], tasks: Json) -> Native:
    """The order of tasksets (its values, where it stands), which they share. NotSupportedYet where they do not."""
    told = [
        order_of_tasks(selector(own), f"{what}.task_selector", tasks, source=f"data.train.{n}")
        for n, (own, what) in enumerate(sets)
    ]
    shared = [_shared(one) for one in told]
    for (_, what), order in zip(sets, shared):
        at, kind = f"{what}.task_selector", order["data.order"]
        if order != shared[0]:
            raise NotSupportedYet(
                f"{at}: another order, with other settings or another seed than that of {sets[0][1]} is coming, not "
                "built yet; here: one for all tasksets, but for feature_keys of offline_easy2hard."
            )
        if kind == "random" and len(sets) > 1:
            raise NotSupportedYet(
                f"{at}.selector_type: random with several tasksets, where as many tasks differ as a step happens to "
                "take from one, is coming, not built yet; write shuffle."
            )
    return {key: value for one in reversed(told) for key, value in one.items()}


def _shared(order: Native) -> Native:
    """What does not belong to one source, and counts."""
    unread = ("data.seed",) if order["data.order"] == "sequential" else ()
    return {k: v for k, v in order.items() if not k.startswith("data.train.") and k not in unread}


def order_of_tasks(own: Own, at: str, tasks: Json = 1, *, source: str = "data.train.0") -> Native:
    """A selector: the order of the rows. tasks: of a step, which random draws without repetition."""
    kind, features = str(given(own["selector_type"]) or "sequential"), own["feature_keys"] or []
    known_as(kind, functions("selector"), key=f"{at}.selector_type")
    if kind == "difficulty_based":
        return _by_difficulty(own, at)
    if kwargs := own.get("kwargs.*"):
        raise ConfigError(
            f"{at}.kwargs.{next(iter(kwargs))}: has no effect with selector_type: {kind}; leave it out."
        )
    if kind != "offline_easy2hard":
        if features:
            raise ConfigError(f"{at}.feature_keys: has no effect with selector_type: {kind}; leave it out.")
        if kind == "random":
            return {"data.order": "random", "data.order.distinct": tasks, "data.seed": own["seed"]}
        return {"data.order": functions("selector")[kind].native, "data.seed": own["seed"]}
    if not isinstance(features, list) or not features:
        raise ConfigError(
            f"{at}.feature_keys: got {shown(features)}, expected columns of numbers: tasks are sorted by the first, "
            "and where that is equal by the next"
        )
    columns = features[0] if len(features) == 1 else features
    return {
        "data.order": functions("selector")[kind].native,
        "data.seed": own["seed"],
        f"{source}.difficulty": columns,
    }
