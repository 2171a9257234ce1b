"""Rewards from a model: a conversation in, one number out.

Rollouts are read one at a time and nothing is padded, so a score is a function of the rollout alone: neither the other
rollouts of a step nor an interruption changes a bit of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.config import schema
from whet.config.sizes import check_files, heads
from whet.data.chat import (
    control_tokens,
    encode_prompts,
    encode_rendered,
    neutral,
    parted,
    read_template,
    render,
    set_day,
)
from whet.guard.foreign import number
from whet.guard.jail import CallResult, Failure
from whet.guard.weights import check_weights
from whet.types import CheckpointError, ConfigError, DataError, Message, Rollout, WhetError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_SPARE = "lm_head."
"""Tensors that many reward models keep from their base language model; scoring does not use them."""


@dataclass(frozen=True)
class LoadedRewardModel:
    """A reward model in memory."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast | None
    """None: it reads the policy's tokens."""
    vocab_size: int
    max_tokens: int | None


@dataclass(frozen=True)
class ModelReward:
    """A reward that a model gives; its weights are read at `load`, or else at the first score."""

    name: str
    cfg: schema.RewardModelConfig
    device: str = "auto"
    """auto (CUDA where there is one), cpu or cuda."""

    @cached_property
    def loaded(self) -> LoadedRewardModel:
        try:
            return _load(self.cfg, self.device)
        except WhetError as error:
            raise type(error)(f"rewards.{self.name}.model: {error}") from error

    def load(self, day: date | None = None) -> None:
        """Read the weights now. day: as in `load_tokenizer`. ConfigError or CheckpointError names the key and the
        folder."""
        if self.loaded.tokenizer is not None and day is not None:
            set_day(self.loaded.tokenizer, day)

    def score(self, rollout: Rollout) -> CallResult:
        """The logit of a rollout as "score"; where inputs may be truncated, also "truncated", 0 or 1."""
        cfg, loaded = self.cfg, self.loaded
        if loaded.tokenizer is None and len(rollout.strands) > 1:
            return _failed(
                f"the rollout has {len(rollout.strands)} strands, no one sequence to score; use input=text"
            )
        try:
            token_ids = self._tokens(rollout)
        except DataError as error:
            return _failed(str(error))
        limit, parts = loaded.max_tokens, {}
        if cfg.overlong != "unscored":
            parts["truncated"] = float(limit is not None and len(token_ids) > limit)
        if limit is not None and len(token_ids) > limit:
            if cfg.overlong == "unscored":
                return _failed(f"the conversation is longer than its max_tokens={limit}")
            token_ids = token_ids[:limit] if cfg.overlong == "truncate_right" else token_ids[-limit:]
        if not token_ids:
            return _failed("the conversation is empty")
        if max(token_ids) >= loaded.vocab_size:
            return _failed(
                f"a token id is outside its vocabulary of {loaded.vocab_size}; input=text uses its own tokenizer"
            )
        try:
            value = number(_logit(loaded.model, token_ids))
        except ValueError as error:
            return _failed(f"it returned {error}")
        return CallResult(parts={"score": value, **parts})

    def _tokens(self, rollout: Rollout) -> list[int]:
        """What the model reads of a rollout."""
        tokenizer, prompt = self.loaded.tokenizer, rollout.task.prompt
        if tokenizer is None:
            return rollout.strand.token_ids.tolist()
        if isinstance(prompt, str):
            return encode_prompts(tokenizer, [prompt + rollout.text])[0]
        if not tokenizer.chat_template:
            raise ConfigError(
                f"rewards.{self.name}.model: its tokenizer has no chat template, but the prompts are chat messages; "
                "give chat_template (Jinja text or a file)"
            )
        control, begun = control_tokens(tokenizer), prompt[-1].role == "assistant"
        said = (prompt[-1].content if begun else "") + rollout.text  # the reply goes on from it
        reply = Message("assistant", parted(control, said))
        before = neutral(control, prompt[:-1] if begun else prompt)
        return encode_rendered(tokenizer, [render(tokenizer, [*before, reply], header=False)])[0]


def _failed(why: str) -> CallResult:
    return CallResult(failure=Failure("bad_value", why))


def _logit(model: PreTrainedModel, token_ids: list[int]) -> float:
    import torch

    with torch.inference_mode():
        logits_1L = model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False).logits
    return float(logits_1L[0, 0])


# ---------------------------------------------------------------- from a folder


def _load(cfg: schema.RewardModelConfig, device: str) -> LoadedRewardModel:
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    path = Path(cfg.path).expanduser()
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"path={path}: no folder with a config.json; reward models are read from local folders"
        )
    tokenizer = None
    if cfg.input == "text":
        # tokenizers are for runs: a mistake in a config is answered before them
        from whet.data.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(schema.TokenizerConfig(path=cfg.tokenizer), model_path=cfg.path)
        if cfg.chat_template is not None:
            tokenizer.chat_template = read_template(cfg.chat_template)
    dtype = cfg.dtype or ("float32" if device == "cpu" else "bfloat16")
    with torch.random.fork_rng(devices=[]):
        model = _read(path, getattr(torch, dtype)).to(device).eval()
    positions: int | None = getattr(model.config, "max_position_embeddings", None)
    rows = len(model.get_input_embeddings().weight)
    if tokenizer is not None and len(tokenizer) > rows:
        raise ConfigError(
            f"path={path}: its tokenizer has {len(tokenizer)} tokens, but its embedding has {rows} rows; set "
            "tokenizer to the folder of the matching tokenizer"
        )
    if cfg.max_tokens and positions and cfg.max_tokens > positions:
        raise ConfigError(
            f"max_tokens={cfg.max_tokens}: {path} has {positions} positions; give at most {positions}"
        )
    return LoadedRewardModel(model, tokenizer, rows, cfg.max_tokens or positions)


def _read(path: Path, dtype: Any) -> Any:
    from transformers import AutoModelForSequenceClassification

    files = heads(path)
    check_files(path, {}, files, key="path")
    check_weights(path, files, key="path")
    try:
        read: Any = AutoModelForSequenceClassification.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below with all the others
            output_loading_info=True,
        )
        _ = len(read[0].get_input_embeddings().weight)
    except Exception as error:  # foreign code reading foreign files: it can fail in any way
        told = str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"path={path}: transformers cannot load it as a classifier: {told}") from error
    model, report = read
    if model.config.num_labels != 1:
        raise ConfigError(
            f"path={path}: {type(model).__name__} with {model.config.num_labels} labels; expected one label "
            "(num_labels in its config.json)"
        )
    found = {
        kind: sorted(key if isinstance(key, str) else key[0] for key in report[f"{kind}_keys"])
        for kind in ("missing", "unexpected", "mismatched")
    }
    found["unexpected"] = [name for name in found["unexpected"] if not name.startswith(_SPARE)]
    if wrong := {kind: names for kind, names in found.items() if names}:
        said = "; ".join(f"{kind}: {', '.join(names[:5])} ({len(names)})" for kind, names in wrong.items())
        raise CheckpointError(f"path={path}: the tensors do not match its {type(model).__name__}. {said}")
    return model
