"""What a run asks of its rollout engine, against what the engine can do."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from whet.config.recipes import compares, resolve
from whet.config.schema import Config
from whet.rollout.engine import Capabilities
from whet.rollout.episode import sampling_by_source, to_sampling
from whet.types import ConfigError

log = logging.getLogger(__name__)

SAMPLE = {
    "unpenalised": "; sample without repetition_penalty and min_tokens",
    "unfiltered": "; sample without filters",
    "plain": "; sample at temperature 1, without filters",
}
"""How log-probs are told after all, by `Capabilities.logprobs`."""


def check_engine(can: Capabilities, cfg: Config) -> None:
    """Raises ConfigError for settings of a stage that the engine cannot serve."""
    name = cfg.rollout.engine
    if lacks := list(unmet(can, cfg)):
        raise ConfigError(f"rollout.engine={name} cannot do what the config asks for: {'; '.join(lacks)}")
    if can.reproducible != "everywhere":
        log.warning(
            "rollout.engine=%s does not repeat its samples (reproducible: %s): a resumed run may differ from an "
            "uninterrupted one",
            name,
            can.reproducible,
        )


def unmet(can: Capabilities, cfg: Config) -> Iterator[str]:
    """What the engine cannot do, each with the setting that asks for it."""
    asked = {"rollout.sampling": cfg.rollout.sampling, "eval.sampling": cfg.eval.sampling}
    asked |= {f"rollout.sources.{name}": own for name, own in cfg.rollout.sources.items()}
    asked |= {f"eval.sources.{name}.sampling": own.sampling for name, own in cfg.eval.sources.items()}
    for section, sampling in asked.items():
        if sampling is None:
            continue
        if not can.stop_texts and sampling.stop:
            yield f"it cannot stop at texts ({section}.stop); use {section}.stop_token_ids"
        if not can.penalties and sampling.repetition_penalty != 1.0:
            yield f"it cannot penalise repetition ({section}.repetition_penalty); leave it at 1"
    if not can.in_flight_updates and cfg.rollout.schedule == "async" and cfg.rollout.partial_rollout:
        yield "it cannot keep requests in flight while weights change; set rollout.partial_rollout=false"
    if not can.experts and cfg.train.router_replay == "sampled":
        yield "it does not return the experts of sampled tokens (train.router_replay=sampled)"
    readers = list(reads_logprobs(cfg))
    samplings = [to_sampling(cfg.rollout.sampling), *sampling_by_source(cfg.rollout).values()]
    if readers and not all(map(can.tells_logprobs, samplings)):
        yield (
            f"it does not return the log-probs of sampled tokens, which are needed by {' and '.join(readers)}"
            + SAMPLE.get(can.logprobs, "")
        )


def reads_logprobs(cfg: Config) -> Iterator[str]:
    """Settings that read the log-probs of the engine itself, where the trainer's own do not serve."""
    algorithm = resolve(cfg.algorithm)
    if algorithm.kind != "online":
        return
    c = algorithm.correction
    if compares(c) or c.reject or c.staleness_decay != 1.0:
        yield "algorithm.correction"
    if algorithm.old_logprobs == "sampled":
        yield "algorithm.old_logprobs=sampled"
    mask = algorithm.settings["loss"].settings
    if mask.get("sequence_mask_delta") is not None and mask.get("sequence_mask_anchor") == "sampled":
        yield "algorithm.loss.sequence_mask_anchor=sampled"
    if algorithm.anchor == "sampled":
        yield f"algorithm.loss={algorithm.loss}"
    if algorithm.settings["advantage"].settings.get("rank_penalty"):
        yield "algorithm.advantage.rank_penalty"
