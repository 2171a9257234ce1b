"""`whet keys --algorithms`: all that an algorithm can be made of, one object each. Readable without torch."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args, get_origin

from whet.config import schema
from whet.config.functions import ADVANTAGES, LOSSES, WEIGHTS, AdvantageEntry, LossEntry
from whet.config.recipes import RECIPES, Recipe
from whet.config.sections.algorithm import Aggregation
from whet.config.sections.base import Section

Entry = dict[str, Any]

HEADS = {
    "recipe": "Recipes: algorithm.name",
    "advantage": "Advantages: algorithm.advantage",
    "loss": "Losses: algorithm.loss",
    "aggregation": "How token losses become one number: algorithm.loss_agg_mode",
    "kl": "KL estimators: algorithm.kl.estimator (in the loss), algorithm.reward_kl.estimator (off the reward)",
    "correction": "Off-policy correction: algorithm.correction",
}


def listed() -> list[Entry]:
    """Objects with `what` (a key of HEADS) and `name`: recipes, then what they are made of.

    pair-mean, the losses' on pairs, is no choice of the user's, and has no key.
    """
    rows: list[Entry] = [{"what": "recipe", "name": name, **_recipe(r)} for name, r in RECIPES.items()]
    rows += [{"what": "advantage", "name": name, **_function(row)} for name, row in ADVANTAGES.items()]
    rows += [{"what": "loss", "name": name, **_function(row)} for name, row in LOSSES.items()]
    rows += [
        {"what": "aggregation", "name": name, "keys": ["algorithm.loss_agg_mode"]}
        for name in get_args(Aggregation)
    ]
    rows.append({"what": "aggregation", "name": "pair-mean", "keys": []})
    in_reward = choices(schema.RewardKlConfig, "estimator")
    for name in choices(schema.KlConfig, "estimator"):
        places = ["algorithm.kl.estimator"] + ["algorithm.reward_kl.estimator"] * (name in in_reward)
        rows.append({"what": "kl", "name": name, "keys": places})
    return rows + _correction()


def _recipe(r: Recipe) -> Entry:
    settings = {
        f"{part}.{name}": value
        for part, row in (("advantage", ADVANTAGES[r.advantage]), ("loss", LOSSES[r.loss]))
        for name, value in r.settings.items()
        if name in row.settings.model_fields
    }
    if r.whiten:
        settings["whiten"] = True
    if r.dynamic_sampling:
        settings["dynamic_sampling"] = True
    if r.expert_loss:
        settings["mix.loss"] = r.expert_loss
    return {
        "learns_from": r.kind,
        "advantage": r.advantage,
        "loss": r.loss,
        "loss_agg_mode": r.loss_agg_mode,
        "settings": settings,
        "needs": sorted(ADVANTAGES[r.advantage].needs | LOSSES[r.loss].needs),
        "source": r.source,
        "note": r.note,
    }


def _function(row: AdvantageEntry | LossEntry) -> Entry:
    return {
        "learns_from": row.kind if isinstance(row, LossEntry) else "online",
        "settings": {name: field.default for name, field in row.settings.model_fields.items()},
        "needs": sorted(row.needs),
    }


def _correction() -> list[Entry]:
    """One object for each key of the section, of its weight, and of its tests (`reject`)."""
    sections: list[tuple[str, type[Section]]] = [
        ("", schema.CorrectionConfig),
        ("weight.", WEIGHTS["token"].settings),
        ("reject[].", schema.RejectConfig),
    ]
    return [
        {
            "what": "correction",
            "name": f"{prefix}{name}",
            "values": list(WEIGHTS if name == "weight" else choices(section, name)),
            "meaning": " ".join((field.description or "").split()),
        }
        for prefix, section in sections
        for name, field in section.model_fields.items()
    ]


def choices(section: type[Section], name: str) -> tuple[str, ...]:
    """The values a key can have, if they are a list of names."""
    kind: Any = section.model_fields[name].annotation
    options = [kind] if get_origin(kind) is Literal else list(get_args(kind))
    return tuple(value for option in options if get_origin(option) is Literal for value in get_args(option))


def as_tables(found: list[Entry]) -> None:
    """Print them for people."""
    # `whet keys --algorithms --json` needs no table.
    from rich.table import Table
    from rich.text import Text

    from whet.config.screen import show

    for what, head in HEADS.items():
        view = Table(pad_edge=False, show_header=False)
        view.add_column(no_wrap=True)
        view.add_column(overflow="fold")
        for entry in found:
            if entry["what"] == what:
                view.add_row(Text(entry["name"]), Text(in_words(entry)))
        show(Text(head))
        show(view)


def in_words(entry: Entry) -> str:
    """What an object says beside its name, on one or two lines."""
    if entry["what"] == "recipe":
        parts = [f"{entry['advantage']} + {entry['loss']}, {entry['loss_agg_mode']}"]
        parts += [f"{key}={json.dumps(value)}" for key, value in entry["settings"].items()]
        parts += [f"learns from {entry['learns_from']}"] * (entry["learns_from"] != "online")
        parts += [f"needs {', '.join(entry['needs'])}"] * bool(entry["needs"])
        return f"{'; '.join(parts)}\n{entry['note']} [{entry['source']}]"
    if entry["what"] in ("advantage", "loss"):
        keys = [f"{name}={json.dumps(value)}" for name, value in entry["settings"].items()]
        return "; ".join(
            [", ".join(keys)] * bool(keys)
            + [f"learns from {entry['learns_from']}"] * (entry["learns_from"] != "online")
            + [f"needs {', '.join(entry['needs'])}"] * bool(entry["needs"])
        )
    if entry["what"] == "correction":
        return "; ".join([" | ".join(entry["values"])] * bool(entry["values"]) + [entry["meaning"]])
    if entry["what"] == "kl":
        return " and ".join(
            {"algorithm.kl.estimator": "in the loss"}.get(k, "off the reward") for k in entry["keys"]
        )
    return "" if entry["keys"] else "of losses on pairs, always"
