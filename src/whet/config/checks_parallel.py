"""Problems of the layout of ranks in the config of one stage."""

from __future__ import annotations

from collections.abc import Iterator

from whet.config.hardware import cuda_count
from whet.config.schema import Config, ParallelConfig
from whet.config.sizes import shape

PIPELINES = ("gemma", "gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Families whose layers a pipeline can be made of: those that `models.pipeline` knows."""


def shards(p: ParallelConfig) -> int:
    """dp_shard; where it is -1, the number that the GPUs allow, at least 1."""
    others = p.dp_replicate * p.tp * p.cp * p.pp
    return max(1, cuda_count() // others) if p.dp_shard == -1 else p.dp_shard


def world(p: ParallelConfig) -> int:
    """Total number of ranks."""
    return p.dp_replicate * shards(p) * p.tp * p.cp * p.pp


def ranks_of(p: ParallelConfig) -> dict[str, int]:
    """Number of ranks by model. Models without separate ranks share those of the policy. Without an entry `policy` the
    process of the run trains the policy."""
    ranks = world(p)
    return ({"policy": ranks} if ranks > 1 else {}) | dict.fromkeys(sorted(set(p.separate_ranks)), ranks)


def first_gpu(p: ParallelConfig, whose: str) -> int:
    """The GPU of the first separate rank of a model. Those of the policy come first, on ranks or not."""
    return world(p) * ["policy", *sorted(set(p.separate_ranks))].index(whose)


def local_gpus(p: ParallelConfig) -> int:
    """GPUs of this machine that a run and its ranks take."""
    return world(p) * (1 + len(set(p.separate_ranks)))


def problems(cfg: Config) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) of train.parallel in one stage's config."""
    p, train = cfg.train.parallel, cfg.train
    yield from _sizes(cfg)
    if twice := [name for n, name in enumerate(p.separate_ranks) if name in p.separate_ranks[:n]]:
        yield "train.parallel.separate_ranks", f"{twice[0]} is listed twice; list it once"
    if (
        ranks_of(p)
        and cfg.profile.steps
        and (absent := [rank for rank in cfg.profile.ranks if rank >= world(p)])
    ):
        yield (
            "profile.ranks",
            f"{absent[0]} does not exist: a model has {world(p)} ranks, counted from 0",
        )
    if world(p) == 1:
        return
    ranks = p.dp_replicate * shards(p)
    rollouts = train.tasks_per_step * cfg.rollout.group_size // train.minibatches
    if ranks > rollouts:
        yield (
            "train.parallel",
            f"dp_replicate * dp_shard = {ranks} ranks would share the {rollouts} rollouts of a minibatch "
            "(tasks_per_step * group_size / minibatches); use fewer ranks or larger minibatches",
        )
    if shards(p) > 1 or p.tp > 1:
        yield from _cut(cfg)


def _sizes(cfg: Config) -> Iterator[tuple[str, str]]:
    """Dims that do not match each other, the model, or the devices."""
    p, key = cfg.train.parallel, "train.parallel"
    if p.dp_shard == -1:
        yield from _left(cfg)
    if shards(p) and shards(p) % p.ep:
        yield (
            f"{key}.ep",
            f"{p.ep} does not divide dp_shard={shards(p)}, whose ranks share the experts; set dp_shard to a multiple "
            "of ep",
        )
    model = shape(cfg.model, cfg.tokenizer) if max(p.pp, p.ep, p.tp, p.cp) > 1 else None
    parts = p.pp * p.pipeline_chunks
    if model is not None and p.pp > 1 and parts > model.layers:
        yield (
            f"{key}.pp",
            f"the {model.layers} layers of the model cannot be split into {parts} parts (pp * pipeline_chunks); choose "
            "a smaller pp or fewer chunks",
        )
    if model is not None and p.pp > 1 and model.family not in PIPELINES:
        yield (
            f"{key}.pp",
            f"a pipeline cannot be made of the layers of {model.family or 'an unknown family'} (model_type), only of "
            f"{', '.join(PIPELINES)}; set it to 1 and use dp_shard",
        )
    if model is not None and p.tp > 1 and model.family == "gpt_oss":
        yield (
            f"{key}.tp",
            "the layers of gpt-oss cannot be partitioned by tensor parallelism; set it to 1 and use ep, cp or dp_shard",
        )
    if model is not None:
        sizes = {
            "attention heads": model.heads,
            "key/value heads": model.kv_heads,
            "columns of the gated layers": model.ffn,
        }
        for what, size in sizes.items():
            if size % p.tp:
                yield (
                    f"{key}.tp",
                    f"{p.tp} does not divide the {size} {what} of the model, of which every rank needs the same "
                    "number; choose another tp, or cp, which repeats key/value heads where it has to",
                )
        if model.heads % p.tp == 0 and (heads := model.heads // p.tp) % p.cp:
            of = "of the model" if p.tp == 1 else f"that tp={p.tp} leaves each rank"
            yield (
                f"{key}.cp",
                f"{p.cp} does not divide the {heads} attention heads {of}, of which every rank needs the same number; "
                "choose another cp or tp",
            )
    if model is not None and p.ep > 1 and (not model.experts or model.experts % p.ep):
        yield (
            f"{key}.ep",
            f"{p.ep} does not divide the model's {model.experts} experts; "
            + ("choose another ep" if model.experts else "set it to 1"),
        )


def _left(cfg: Config) -> Iterator[tuple[str, str]]:
    """Where dp_shard=-1 has no value."""
    p, key = cfg.train.parallel, "train.parallel.dp_shard"
    others = p.dp_replicate * p.tp * p.cp * p.pp
    if cfg.cluster.ranks:
        yield (
            key,
            "-1 counts the GPUs of one machine, but cluster.ranks may use several; give the number of ranks",
        )
    elif cfg.machine.device == "cpu" or not cuda_count():
        yield key, "-1 means all remaining GPUs, but this stage trains on the CPU; give the number of ranks"
    elif cuda_count() % others:
        yield (
            key,
            f"-1: the other dims have {others} ranks, which does not divide the {cuda_count()} GPUs of this machine; "
            "change these dims, or give a number",
        )


def _cut(cfg: Config) -> Iterator[tuple[str, str]]:
    """Features that need whole tensors, or move them themselves."""
    ref = cfg.reference
    if cfg.model.lora and ref.path and ref.reset_interval:
        yield (
            "reference.path",
            "a reference from another folder cannot be reset to a policy with adapters (reference.reset_interval) "
            "where dp_shard or tp of train.parallel shard both; leave the path out, or use dp_replicate",
        )
