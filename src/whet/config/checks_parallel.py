"""What cannot be spread over ranks as a stage's config says."""

from __future__ import annotations

from collections.abc import Iterator

from whet.config.schema import Config, Parallel


def world(p: Parallel) -> int:
    """Ranks in all."""
    return p.dp_replicate * p.dp_shard * p.tp * p.cp * p.pp


def problems(cfg: Config) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) of train.parallel in one stage's config."""
    p, train = cfg.train.parallel, cfg.train
    for name, kind in (("pp", "pipeline"), ("ep", "expert")):
        if getattr(p, name) > 1:
            yield (
                f"train.parallel.{name}",
                f"{getattr(p, name)}: the train engine cannot spread a model by {kind} parallelism yet; set it to 1 "
                "and use dp_shard",
            )
    if world(p) == 1:
        return
    ranks = p.dp_replicate * p.dp_shard
    rollouts = train.tasks_per_step // train.minibatches * cfg.rollout.group_size
    if ranks > rollouts:
        yield (
            "train.parallel",
            f"dp_replicate * dp_shard = {ranks} ranks would share the {rollouts} rollouts of a minibatch "
            "(tasks_per_step / minibatches * group_size); use fewer ranks or larger minibatches",
        )
    if cfg.machine.exact == "on":
        yield (
            "machine.exact",
            "on: with train.parallel sampling and training are in other processes, and their equality is measured, "
            "not proved; use auto",
        )
    if train.offload:
        yield "train.offload", f"{', '.join(train.offload)}: not built for several ranks (train.parallel)"
    if train.compile:
        yield "train.compile", "true: not built for several ranks (train.parallel)"
    if p.dp_shard > 1 or p.tp > 1:
        yield from _cut(cfg)


def _cut(cfg: Config) -> Iterator[tuple[str, str]]:
    """What needs whole tensors, or moves them itself."""
    train = cfg.train
    for at, optimizer in (("train", train.optimizer), ("critic", cfg.critic.optimizer)):
        if optimizer.kind == "muon":
            yield (
                f"{at}.optimizer.kind",
                "muon works on whole matrices, and dp_shard and tp of train.parallel cut them; use dp_replicate or "
                "adamw",
            )
        if optimizer.state == "int8":
            yield (
                f"{at}.optimizer.state",
                "int8 keeps blocks of whole tensors, and dp_shard and tp of train.parallel cut them; use float32",
            )
    ref = cfg.reference
    if cfg.model.lora and ref.path and (ref.reset_every or ref.reset_every_epochs):
        yield (
            "reference.path",
            "a reference of another folder cannot become a policy with adapters (reference.reset_every) where "
            "dp_shard or tp of train.parallel cut both; leave the path out or use dp_replicate",
        )
    if train.precision.reduce is not None:
        yield (
            "train.precision.reduce",
            "with dp_shard or tp of train.parallel gradients are added up in model.dtype; leave it out",
        )
