"""When the keys of optimizers, of their schedules and of adapters are read."""

from __future__ import annotations

from whet.config.conditions import Condition, Rule, read_when, under
from whet.config.learning import READS


def optimizer_rules(at: str) -> tuple[Rule, ...]:
    """Rules for the keys of an optimizer and of its schedule."""
    s = f"{at}.schedule"
    ends: Condition = {"key": f"{s}.weight_decay_end", "given": True}
    changes: Condition = {"not": {"key": f"{s}.type", "is": "constant"}}
    fraction: Condition = {"key": f"{s}.warmup_ratio", "above": 0}
    warms_up: Condition = {"any": [{"key": f"{s}.warmup_steps", "above": 0}, fraction]}
    by_kind = tuple(
        read_when(
            (f"{s}.{key}",),
            {"key": f"{s}.type", "in": [kind for kind, read in READS.items() if key in read]},
            f"type={{cfg.{s}.type}} does not read it",
        )
        for key in ("min_lr_ratio", "num_cycles", "decay_steps", "decay_ratio", "decay_type")
    )
    kind = f"name={{cfg.{at}.name}} does not read it"
    return (
        read_when(under(at, "betas", "eps"), {"not": {"key": f"{at}.name", "is": "sgd"}}, kind),
        read_when((f"{at}.state_dtype",), {"not": {"key": f"{at}.name", "is": "sgd"}}, kind),
        read_when(
            (f"{at}.implementation",),
            {"key": f"{at}.state_dtype", "is": "float32"},
            f"state_dtype={{cfg.{at}.state_dtype}} has a separate implementation",
        ),
        read_when((f"{at}.momentum",), {"key": f"{at}.name", "in": ["sgd", "muon"]}, kind),
        read_when(
            (f"{at}.decay_all",),
            {
                "any": [
                    {"key": f"{at}.weight_decay", "above": 0},
                    {"key": f"{s}.weight_decay_end", "above": 0},
                ]
            },
            "weight_decay is 0",
        ),
        *by_kind,
        read_when(
            (f"{s}.decay_ratio",),
            {"key": f"{s}.decay_steps", "given": False},
            "decay_steps gives the length of the decay",
        ),
        read_when(
            (f"{s}.num_cycles",),
            {"any": [{"key": f"{s}.type", "is": "cosine"}, {"key": f"{s}.decay_type", "is": "cosine"}]},
            f"decay_type={{cfg.{s}.decay_type}} has no cycles",
        ),
        read_when(
            (f"{s}.total_steps",), {"any": [changes, fraction]}, "type=constant does not depend on the length"
        ),
        read_when(under(s, "warmup_start_ratio", "warmup_ends"), warms_up, "there is no warm-up"),
        read_when((f"{s}.weight_decay_type",), ends, "weight_decay_end is null, so weight decay is constant"),
        read_when(
            (f"{s}.unit",), {"any": [changes, warms_up, ends]}, "learning rate and weight decay are constant"
        ),
    )


def lora_rules(at: str) -> tuple[Rule, ...]:
    """Rules for the keys of adapters."""
    return (
        read_when(
            under(at, "init", "pissa_iterations"),
            {"key": f"{at}.path", "given": False},
            f"the initial adapters come from {at}.path",
        ),
        read_when(
            (f"{at}.pissa_iterations",), {"key": f"{at}.init", "is": "pissa"}, "only init=pissa reads it"
        ),
    )
