"""The memory of a stage as `whet plan` prints it, and the error for a stage that does not fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from whet.config import memory
from whet.config.checks_parallel import ranks_of, shards, world
from whet.config.derived import QUANTISED, Plan, quantised_size
from whet.config.evaluation import trains
from whet.config.groups import pairs_tasks
from whet.config.hardware import cuda_bytes, has_tiles, multiplies_half, ram_bytes
from whet.config.keys import lookup
from whet.config.learns import Learns
from whet.config.memory import Lengths, ModelMemory, Parts, PeakBatch, Phase, Setting
from whet.config.rank_share import HostedModel, part
from whet.config.rank_share import rank_phases as spread_phases
from whet.config.resuming import class_of
from whet.config.schema import TrainConfig
from whet.config.sizes import DTYPE_BYTES, PAGE_TOKENS, VECTOR, Shape, in_words, micro_batch_tokens
from whet.types import ConfigError

MAKER = "the process that makes models"
"""See `whet.models.apart`."""


@dataclass(frozen=True)
class ProcessMemory:
    """Processes of one kind: the main process, the one that makes models, ranks, replicas."""

    name: str
    count: int
    phases: list[Phase]

    @property
    def most(self) -> Phase:
        return memory.largest(self.phases)


def places(plan: Plan) -> list[ProcessMemory]:
    """The processes that use memory in a stage; [] where the size of the model is not known."""
    if plan.shape is None or plan.learns is None or not plan.shape.vocab_size:
        return []
    out = [ProcessMemory("this process", 1, phases(plan))]
    if plan.models_elsewhere:
        out.append(ProcessMemory(MAKER, 1, [Phase("making a model", {"a model, whole": _largest(plan)})]))
    for group, count in ranks_of(plan.train.parallel).items():
        out.append(ProcessMemory(_rank_of(group), count, rank_phases(plan, group)))
    if plan.cfg.rollout.replicas and plan.generates:
        out.append(ProcessMemory("each replica", plan.cfg.rollout.replicas, _replica_phases(plan)))
    return out


def phases(plan: Plan) -> list[Phase]:
    """The phases of a step in the main process; [] where the size of the model is not known."""
    found, kept = _without_reuse(plan), reused_tokens(plan)
    if not kept or plan.shape is None:
        return found
    held = {"activations of sampling": kept * reused_bytes(plan.shape)}
    return [replace(phase, parts={**phase.parts, **held}) for phase in found]


REUSED = ("gemma", "llama", "mistral", "qwen2", "qwen3")
"""Families of dense models whose layers over the cache are one call of C, if their heads have whole vectors."""


def reused_bytes(shape: Shape) -> int:
    """Of one token, all layers: see `whet.models.activations`."""
    return 4 * shape.layers * sum(shape.layer_outputs)


def reused_tokens(plan: Plan) -> int:
    """Tokens whose activations sampling keeps for the update at most: all of a step, or what fits in a quarter of the
    memory that the largest phase leaves. 0: sampling and training are not one computation on this CPU, or
    train.gradient_checkpointing is to save the memory."""
    cfg, train, shape = plan.cfg, plan.train, plan.shape
    alike = (
        plan.mode == "synchronous"
        and plan.algorithm.kind == "online"
        and (cfg.mode, cfg.rollout.engine, train.engine) == ("both", "native", "torch")
        and (plan.device, plan.dtype, plan.compiled) == ("cpu", "float32", True)
        and not (plan.samples_apart or plan.quantized or cfg.rollout.replicas or cfg.model.lora)
        and not (train.compile or train.precision.compute or train.precision.float8)
        and world(train.parallel) == 1
    )
    if (
        not alike
        or train.gradient_checkpointing
        or shape is None
        or shape.experts
        or shape.family not in REUSED
        or shape.head_dim % VECTOR
    ):
        return 0
    lengths, found = _lengths(plan), _without_reuse(plan)
    # the last token of a reply is not fed; a page that a history fills in part is computed again for later rows
    own = plan.group_size * (lengths.reply - 1 + PAGE_TOKENS)
    step = plan.sampled_tasks_per_step * (lengths.prompt + own)
    taken = memory.largest(found).total if found else limit(plan) // 2
    return min(step, max(0, limit(plan) - taken) // 4 // reused_bytes(shape))


def _without_reuse(plan: Plan) -> list[Phase]:
    """`phases` of a run that computes everything itself."""
    if plan.shape is None or plan.learns is None or not plan.shape.vocab_size:
        return []
    if not trains(plan.cfg):
        return _replica_phases(plan)
    setting, lengths = _setting(plan), _lengths(plan)
    own = plan.generates and not plan.cfg.rollout.replicas
    cache, sampling = _sampling(plan, setting, lengths) if own else (0, 0)
    tokens = plan.rollouts_per_step * (lengths.prompt + lengths.reply)
    rollouts = tokens * (memory.ROLLOUT_BYTES + _routed_bytes(plan))
    if world(plan.train.parallel) > 1:
        return _driver_phases(plan, cache=cache, sampling=sampling, rollouts=rollouts)
    models = [m for m in _models(plan, setting, lengths) if m.name not in plan.train.parallel.separate_ranks]
    cuts = [c for m in models for c in (m.cut, m.cut.second) if c is not None]
    return memory.phases(
        models,
        cache=cache,
        sampling=sampling,
        rollouts=rollouts,
        rewards={
            **plan.beside,
            **_products(plan, setting, samples=own, cuts=cuts),
            **_angles(plan, tables=own + sum(m.name != "sampler" for m in models)),
        },
    )


def _routed_bytes(plan: Plan) -> int:
    """Of a token: the numbers of its experts (train.router_replay), in the batch and, if sampled, in the rollout."""
    shape, replay = plan.shape, plan.cfg.train.router_replay
    if shape is None or replay == "none":
        return 0
    wide = 1 if shape.experts <= 256 else 2
    return shape.layers * shape.experts_per_token * wide * (2 if replay == "sampled" else 1)


def _setting(plan: Plan) -> Setting:
    assert plan.shape is not None
    return Setting(shape=plan.shape, dtype=plan.dtype, compiled=plan.compiled, cpu=plan.device == "cpu")


def _driver_phases(plan: Plan, *, cache: int, sampling: int, rollouts: int) -> list[Phase]:
    """The main process where ranks train: it holds another model only until the ranks have loaded it; the full policy,
    too, unless an engine here samples from it. It holds none at all if no stage needs one here."""
    held = {"policy": _policy_bytes(plan)}
    if not plan.policy_on_ranks:
        held |= {name: count for name, count in plan.copies.items() if name == "sampler"}
    opening = Phase("opening the ranks", {**held, "another model, whole": max(_others(plan), default=0)})
    out = [] if plan.models_elsewhere else [opening]
    if plan.policy_on_ranks:
        del held["policy"]
    held |= {"KV cache": cache, "rollouts": rollouts, **plan.beside}
    held |= _products(plan, _setting(plan), samples=bool(sampling)) | _angles(plan, tables=bool(sampling))
    return [*out, Phase("sampling", {**held, "activations": sampling})]


def _policy_bytes(plan: Plan) -> int:
    assert plan.learns is not None
    return (plan.learns.base + plan.learns.adapted) * DTYPE_BYTES[plan.dtype] + plan.learns.adapters * 4


def _others(plan: Plan) -> list[int]:
    """Bytes of the models beside the policy that are made for the ranks."""
    other = [n for name, n in plan.copies.items() if name in plan.references]
    critic = plan.critic_learns if plan.critic is not None else None
    return other + ([] if critic is None else [critic.base * DTYPE_BYTES[plan.dtype]])


def _largest(plan: Plan) -> int:
    """Bytes of the largest model that is made for the ranks."""
    return max([_policy_bytes(plan), *_others(plan)])


def _rank_of(group: str) -> str:
    return "each rank" if group == "policy" else f"each rank of the {group}"


def rank_phases(plan: Plan, group: str = "policy") -> list[Phase]:
    """The phases of the rank with the largest peak among the ranks of a model; [] where there are none."""
    parallel = plan.train.parallel
    if group not in ranks_of(parallel) or plan.shape is None or not plan.shape.vocab_size:
        return []
    along = (_phases_along(plan, group, at) for at in range(parallel.pp))
    return max(along, key=lambda found: memory.largest(found).total)


def _phases_along(plan: Plan, group: str, at: int) -> list[Phase]:
    """The phases of the at-th rank of a pipeline."""
    assert plan.shape is not None
    layout, lengths, size = plan.train.parallel, _lengths(plan), DTYPE_BYTES[plan.dtype]
    gathers = not plan.saves_parts and shards(layout) * layout.tp * layout.pp > 1
    compiled = plan.compiled and layout.tp == layout.ep == 1  # else the modules of the model compute
    out = []
    for name, train, learned in _trained(plan):
        lora, trainable = (
            (plan.cfg.model.lora, train.trainable) if name == "policy" else (plan.cfg.critic.lora, {})
        )
        share = part(plan.shape, layout, lora=lora, trainable=trainable, at=at)
        setting = replace(_setting(plan), shape=share.shape, compiled=compiled)
        cut, forward = _cuts(plan, train, lengths)
        head = _has_output(plan, name) and at == layout.pp - 1
        model = memory.learner(
            name, share.learns, train, setting=setting, cut=cut, forward=forward, head=head
        )
        model = replace(model, flight=_flight(plan, train, cut, lengths, at=at))
        whole = memory.learner(name, learned, train, setting=setting, cut=cut, forward=forward, head=head)
        weights = share.whole * size
        host = partial(HostedModel, share=share, size=size, layout=layout)
        if group == (name if name in layout.separate_ranks else "policy"):
            out.append(host(model=model, saved=max(whole.state, weights) if gathers else 0))
        if name == "critic":
            continue
        still = ModelMemory(
            name="",
            weights=share.learns.base * size,
            setting=setting,
            cut=cut,
            forward=forward,
            head=head,
        )
        if group == ("reference" if "reference" in layout.separate_ranks else "policy"):
            saved = weights if gathers and plan.reference_saved else 0
            out += [host(model=replace(still, name=each), saved=saved) for each in plan.references]
        if group == "policy" and plan.policy_on_ranks and "sampler" in plan.copies:
            out.append(host(model=replace(still, name="sampler"), saved=weights if gathers else 0))
    cuts = [c for h in out for c in (h.model.cut, h.model.cut.second) if c is not None]
    # with tp or ep the modules of the model compute, which keep no table
    tables = sum(h.model.name != "sampler" for h in out) if layout.tp == layout.ep == 1 else 0
    beside = _products(plan, out[0].model.setting, cuts=cuts) if out else {}
    return spread_phases(out, beside=beside | _angles(plan, tables=tables))


def _trained(plan: Plan) -> Iterator[tuple[str, TrainConfig, Learns]]:
    """(name, how it trains, how much of it learns) of the policy and the critic."""
    assert plan.learns is not None
    yield "policy", plan.train, plan.learns
    if plan.critic is not None and plan.critic_learns is not None:
        yield "critic", plan.critic, plan.critic_learns


def _has_output(plan: Plan, name: str) -> bool:
    """Whether a trained model's output layer computes: the policy's, and that of a critic that is a language model."""
    return name == "policy" or plan.algorithm.implicit_reward


def _products(
    plan: Plan, setting: Setting, *, samples: bool = False, cuts: Sequence[PeakBatch] = ()
) -> Parts:
    """Memory that oneDNN keeps for products in half precision on a CPU."""
    own = has_tiles(plan.dtype) or plan.cfg.machine.kernels == "compiled"
    library = plan.device == "cpu" and multiplies_half(plan.dtype) and not own
    count = memory.products_bytes(setting, samples=samples, cuts=cuts) if library else 0
    return {"products in half precision": count} if count else {}


def _angles(plan: Plan, *, tables: int) -> Parts:
    """Tables of rotary angles on a CPU: of every model that trains or scores, and of the engine, which alone computes
    with the sampler. While one grows, the old and the new one are there."""
    if plan.device != "cpu" or plan.shape is None or not tables:
        return {}
    return {"rotary angles": (tables + 1) * plan.shape.rope_bytes(plan.max_sequence_tokens)}


def _flight(plan: Plan, train: TrainConfig, cut: PeakBatch, lengths: Lengths, *, at: int) -> int:
    """Micro-batches that the at-th rank of pp keeps at one time (`models.pipeline.schedule`); with several chunks,
    converted to whole micro-batches."""
    p = plan.train.parallel
    rollouts = -(-(plan.rollouts_per_step // train.minibatches) // (p.dp_replicate * shards(p)))
    micros = -(-rollouts * lengths.reply // max(1, cut.sampled * p.cp))
    chunks, after = p.pipeline_chunks, p.pp - at - 1
    holds = after + 1 if chunks == 1 else 2 * after + (chunks - 1) * p.pp + 1
    return min(-(-holds // chunks), max(1, micros))


def _cuts(plan: Plan, train: TrainConfig, lengths: Lengths) -> tuple[PeakBatch, PeakBatch]:
    """The largest micro-batches of a rank, with gradients and without."""
    assert plan.shape is not None
    p, rollouts = plan.train.parallel, plan.rollouts_per_step
    dp = p.dp_replicate * shards(p)
    default = micro_batch_tokens(plan.device, plan.shape.hidden)
    cut = memory.cut(
        train,
        lengths,
        rollouts=-(-(rollouts // train.minibatches) // dp),
        default_tokens=default,
        whole_groups=plan.algorithm.pairs,
    )
    forward = memory.forward_cut(train, cut, lengths, rollouts=-(-rollouts // dp))
    return _shared(cut, p.cp), _shared(forward, p.cp)


def _shared(cut: PeakBatch, ranks: int) -> PeakBatch:
    """The part of a micro-batch that one of `ranks` cp ranks computes."""
    second = None if cut.second is None else _shared(cut.second, ranks)
    return replace(cut, tokens=-(-cut.tokens // ranks), sampled=-(-cut.sampled // ranks), second=second)


def _replica_phases(plan: Plan) -> list[Phase]:
    """An engine with a copy of the weights; at most it has all rollouts. Quantised weights are made from full weights,
    which are then freed."""
    assert plan.learns is not None
    assert plan.shape is not None
    cache, sampling = _sampling(plan, _setting(plan), _lengths(plan))
    size, gone = (
        DTYPE_BYTES[plan.dtype],
        quantised_size(plan.shape.tensors, plan.quantized)[0] if plan.quantized else 0,
    )
    eight = {QUANTISED: plan.quantized_bytes} if plan.quantized else {}
    held = {"policy": (plan.learns.base - gone) * size, **eight, "KV cache": cache}
    held |= _products(plan, _setting(plan), samples=True) | _angles(plan, tables=1)
    start = (
        [Phase("opening the engine", {**held, "policy": plan.learns.base * size})] if plan.quantized else []
    )
    return [*start, Phase("sampling", {**held, "activations": sampling})]


def _lengths(plan: Plan) -> Lengths:
    """The longest reply, and the longest prompt that the limit on both together allows."""
    total = plan.total_tokens or plan.cfg.data.max_prompt_tokens + plan.train_reply_tokens
    reply = min(plan.train_reply_tokens, total - 1)
    group = 2 if pairs_tasks(plan.cfg, plan.algorithm) else plan.group_size
    return Lengths(prompt=min(plan.cfg.data.max_prompt_tokens, total - reply), reply=reply, group=group)


def _models(plan: Plan, setting: Setting, lengths: Lengths) -> list[ModelMemory]:
    """The models of a process that trains without ranks."""
    if plan.cfg.train.engine == "simulated":
        assert plan.learns is not None
        cut, forward = _cuts(plan, plan.train, lengths)
        held = {"policy": (plan.learns.base + plan.learns.adapted) * setting.bytes, **plan.copies}
        return [
            ModelMemory(name=name, weights=held[name], setting=setting, cut=cut, forward=forward)
            for name in ("policy", "sampler")
            if name in held
        ]
    out = []
    for name, train, learned in _trained(plan):
        cut, forward = _cuts(plan, train, lengths)
        head = _has_output(plan, name)
        out.append(memory.learner(name, learned, train, setting=setting, cut=cut, forward=forward, head=head))
        for copy, weights in plan.copies.items() if name == "policy" else ():
            out.append(ModelMemory(name=copy, weights=weights, setting=setting, cut=cut, forward=forward))
    return out


def _sampling(plan: Plan, setting: Setting, lengths: Lengths) -> tuple[int, int]:
    """(KV cache, further memory of prefill and decode)."""
    assert plan.kv_cache_bytes is not None
    asked = plan.sampled_tasks_per_step * plan.group_size if plan.algorithm.kind == "online" else 0
    rows = plan.cfg.rollout.max_num_seqs if plan.judges else min(plan.cfg.rollout.max_num_seqs, asked)
    cache = plan.kv_cache_bytes
    if (
        plan.device == "cpu"
    ):  # pages that are never written to take no memory; those of ended rollouts are kept
        own = memory.touched_cache(setting.shape, lengths, rows=asked, dtype=plan.cache_dtype)
        evaluated = Lengths(prompt=lengths.prompt, reply=plan.reply_tokens, group=1)
        judged = memory.touched_cache(setting.shape, evaluated, rows=rows, dtype=plan.cache_dtype)
        cache = min(cache, max(own, judged if plan.judges else 0))
    return cache, memory.sampling_bytes(setting, prompt=lengths.prompt, rows=rows)


# ---------------------------------------------------------------- comparison with the limit


def limit(plan: Plan) -> int:
    """Bytes that the stage may take of the device it trains on."""
    if plan.cfg.machine.memory_mb is not None:
        return plan.cfg.machine.memory_mb << 20
    if plan.device == "cuda":
        return cuda_bytes() or ram_bytes()
    return ram_bytes() - memory.LIBRARIES


def check_memory(plans: Sequence[Plan], *, going_on: bool = False) -> None:
    """ConfigError with the largest contributors and the remedy, if a stage does not fit into memory. going_on: the run
    resumes from a checkpoint, so not every key may change."""
    said = [text for plan in plans for text in _too_large(plan, going_on=going_on)]
    if said:
        raise ConfigError("\n".join(said))


def together(plan: Plan) -> list[tuple[str, list[ProcessMemory]]]:
    """Processes that share one memory: (their name, the processes). On the CPU these are all processes of this machine;
    with GPUs each rank has one, the first rank of the policy shares it with this process, and replicas have others."""
    found = {place.name: place for place in places(plan)}
    own, replica = found.get("this process"), found.get("each replica")
    if own is None:
        return []
    ranks = {group: found[_rank_of(group)] for group in ranks_of(plan.train.parallel)}
    near = (
        []
        if plan.cfg.cluster.ranks
        else [group for group in ranks if plan.device == "cpu" or group == "policy"]
    )
    most = {group: rank if plan.device == "cpu" else replace(rank, count=1) for group, rank in ranks.items()}
    maker = [found[MAKER]] if MAKER in found else []
    out = [("stage", [own, *maker, *(most[group] for group in near)])]
    for group in (group for group in ranks if group not in near):
        whose = "" if group == "policy" else f" of the {group}"
        out.append((f"a rank{whose} of stage", [replace(ranks[group], count=1)]))
    return out + ([("a replica of stage", [replace(replica, count=1)])] if replica is not None else [])


def _too_large(plan: Plan, *, going_on: bool) -> Iterator[str]:
    for what, shared in together(plan):
        total, most = sum(place.count * place.most.total for place in shared), limit(plan)
        if plan.device == "cpu" and plan.cfg.machine.memory_mb is None:
            most -= memory.LIBRARIES * (sum(place.count for place in shared) - 1)
        if total > most:
            yield _refusal(plan, what, shared, most, going_on=going_on)


_KEY = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")


def _may_change(text: str) -> bool:
    """Whether a run that resumes from a checkpoint can follow a piece of advice without a change of numbers."""
    found = [
        class_of(key.path) for name in _KEY.findall(text) if (key := lookup(name.split("."))) is not None
    ]
    return bool(found) and all(kind in ("free", "rounding") for kind in found)


def out_of_memory(plan: Plan, stage: str, said: str) -> str:
    """The remedy when a stage ran out of memory: settings that a resumed run may change, with values to try.

    stage: prefix of a key of the stage, `stages.NAME.` or nothing. said: the message of the allocator.
    """
    train = plan.train
    micro = micro_batch_tokens(plan.device, plan.shape.hidden) if plan.shape else 0
    if train.micro_batch_rollouts is not None:
        cut = [("train.micro_batch_rollouts", train.micro_batch_rollouts)]
    else:
        cut = [("train.micro_batch_tokens", train.micro_batch_tokens or micro)]
    cut += (
        [("train.forward_micro_batch_tokens", train.forward_micro_batch_tokens)]
        if train.forward_micro_batch_tokens
        else []
    )
    cut += [("rollout.max_num_seqs", plan.cfg.rollout.max_num_seqs)] if plan.generates else []
    tries = [f"{stage}{key}={now // 2} (now {now})" for key, now in cut if now > 1]
    if not train.gradient_checkpointing:
        tries.append(f"{stage}train.gradient_checkpointing=true (now false)")
    fewer = [("train.tasks_per_step", train.tasks_per_step), ("rollout.group_size", plan.group_size)]
    most = " or ".join(f"{stage}{key} (now {now})" for key, now in fewer if now > 1)
    rollouts = f". If the rollouts of a step are too many: a smaller {most}, with `whet train --change`"
    return (
        f"stage '{plan.name}' ran out of memory: {said.splitlines()[0]}. The same command resumes from the last "
        f"checkpoint with one or more of: {', '.join(tries)}. They change memory and time, and numbers only by rounding"
        f"{rollouts if plan.generates and most else ''}"
    )


def _done(plan: Plan) -> Iterator[str]:
    """Settings that reduce memory and are already made."""
    layout = plan.train.parallel
    made = {
        "model.dtype=bfloat16": plan.dtype != "float32",
        "model.lora": plan.cfg.model.lora is not None,
        "critic.lora": plan.cfg.critic.lora is not None,
        "train.optimizer.name=sgd": plan.train.optimizer.name == "sgd",
        "train.gradient_checkpointing": plan.train.gradient_checkpointing,
        "train.parallel.reshard_after_forward": layout.reshard_after_forward,
    }
    yield from (key for key, is_made in made.items() if is_made)


def _refusal(plan: Plan, what: str, shared: list[ProcessMemory], most: int, *, going_on: bool) -> str:
    total = sum(place.count * place.most.total for place in shared)
    worst = max(shared, key=lambda place: place.count * place.most.total)
    parts = sorted(worst.most.parts.items(), key=lambda item: -item[1])[:4]
    told = ", ".join(f"{name} {in_words(count)}" for name, count in parts if count)
    advised = memory.advice(worst.most.parts, done=list(_done(plan)), may=_may_change if going_on else None)
    change = "; or ".join(advised) or "a machine with more memory, or a smaller model in another run_dir"
    where = (
        "machine.memory_mb"
        if plan.cfg.machine.memory_mb
        else "the GPU"
        if plan.device == "cuda"
        else "this machine"
    )
    phase = worst.most.name
    if len(shared) > 1:
        counts = ", ".join(
            f"{place.name} {in_words(place.most.total)}" + (f" x {place.count}" if place.count > 1 else "")
            for place in shared
        )
        doing = phase.partition(" ")[0].endswith("ing")  # saving the policy, or: update of it
        phase = f"{counts}; {worst.name} {'when' if doing else 'in the'} {phase}"
    return (
        f"{what} '{plan.name}' takes up to {in_words(total)} ({phase}), but {where} has {in_words(max(0, most))}: "
        f"{told}. To reduce it: {change}. machine.memory_mb sets another limit"
    )
