"""Models in and out: from a Hugging Face folder or from scratch, and back to a folder. Safetensors only."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME
from transformers.utils.quantization_config import Mxfp4Config

from whet import seeds
from whet.config import schema
from whet.config.mtp import COUNT, mtp_of, names_of
from whet.config.scratch import config_json, over, problems
from whet.config.sizes import MOST_LAYERS, Head, check_files, exported, heads
from whet.config.urls import hub_hint
from whet.data.timed import decoded
from whet.environment import quiet_deepspeed
from whet.guard.weights import check_weights
from whet.inputs import read_json_object
from whet.models import mimo, mtp
from whet.models.grid import put_experts_on
from whet.track.files import RUN_DIR, atomic_folder
from whet.types import CheckpointError, ConfigError

log = logging.getLogger(__name__)
mimo.register()

NAMES = ("model.path", "model.overrides")
"""The keys of the policy's folder and of what is put over its config.json."""


def build(
    cfg: schema.ModelConfig,
    *,
    vocab_size: int,
    eos_token_id: int | None,
    pad_token_id: int | None,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype,
    head: str | None = None,
    names: tuple[str, str] = NAMES,
) -> PreTrainedModel:
    """The model of `cfg.path` or `cfg.scratch`, in evaluation mode (no dropout), on `device` in `dtype`.

    vocab_size: number of tokens of the tokenizer; an embedding may be larger, not smaller. The two token ids are stored
    in a scratch model's config. Scratch weights depend on `seed` only. head: name of a value head that the folder may
    hold in place of the output layer; see `value_head`. names: the keys of the path and the overrides. Errors:
    ConfigError for invalid settings, CheckpointError for files that cannot be read.
    """
    if (cfg.path is None) == (cfg.scratch is None):
        raise ConfigError("model: give either `path` (a Hugging Face folder) or `scratch`")
    if cfg.path is not None:
        path = Path(cfg.path).expanduser()
        config, files = examined(path, cfg, vocab_size=vocab_size, names=names)
        model = _load(path, cfg, config, files, seed=seed, dtype=dtype, head=head, key=names[0])
    else:
        config = _scratch_config(cfg, vocab_size=vocab_size)
        model = _initialise(config, seed=seed, dtype=dtype)
        if (ahead := mtp_of(cfg)) is not None:
            mtp.attach(model, ahead.settings["layers"] or 1, seed=seed)
        for holder in (model.config, model.generation_config):
            holder.eos_token_id, holder.pad_token_id = eos_token_id, pad_token_id
    if cfg.expert_grid is not None:
        put_experts_on(model, cfg.expert_grid)
    # In a packed batch nothing is padding: the pad token (often the end token) learns like any other.
    _embedding(model).padding_idx = None
    nn.Module.to(model, device)
    return model.eval()


def empty(
    config: dict[str, Any], *, dtype: torch.dtype, device: torch.device | str, seed: int
) -> PreTrainedModel:
    """A model of a config.json, ready to take weights; those it has are random."""
    values = dict(config)
    model = _initialise(AutoConfig.for_model(values.pop("model_type"), **values), seed=seed, dtype=dtype)
    if count := values.get(COUNT):
        mtp.attach(model, count, seed=seed)
    _embedding(model).padding_idx = None
    nn.Module.to(model, device)
    return model.eval().requires_grad_(False)


def _embedding(model: PreTrainedModel) -> nn.Embedding:
    """The input embedding."""
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding):
        raise ConfigError(f"{type(model).__name__} has no token embedding; use a causal language model")
    return embedding


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a reply: the tokenizer's, and all in the model's own generation config."""
    return _end_tokens(model.generation_config, tokenizer)


def end_tokens_ahead(cfg: schema.ModelConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The same, before `build` makes the model."""
    own: GenerationConfig | None = None
    if cfg.path is not None:
        path = Path(cfg.path).expanduser()
        of_model = not (path / GENERATION_CONFIG_NAME).is_file()
        file = CONFIG_NAME if of_model else GENERATION_CONFIG_NAME
        with contextlib.suppress(Exception):  # what cannot be read is `build`'s to tell
            own = GenerationConfig.from_pretrained(
                path, file, local_files_only=True, _from_model_config=of_model
            )
    return _end_tokens(own, tokenizer)


def _end_tokens(config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    named = config.eos_token_id if config is not None else None
    several = named if isinstance(named, list) else [named]
    return frozenset(t for t in (*several, tokenizer.eos_token_id) if t is not None)


def value_head(hidden_size: int, seed: int, *, path: str | None = None, name: str | None = None) -> nn.Linear:
    """The linear layer [1, D] of a critic: the one called `name` in the folder `path`, if both are given and it is
    there, else a new one with weights N(0, 1/(D+1)^2) by the seed: values start near 0.
    """
    head = nn.utils.skip_init(nn.Linear, hidden_size, 1)
    if path is not None and name is not None and _fill(head, Path(path).expanduser(), name):
        return head
    generator = torch.Generator().manual_seed(seeds.key(seed, "value_head"))
    with torch.no_grad():
        head.weight.normal_(0.0, 1.0 / (hidden_size + 1), generator=generator)
        head.bias.zero_()
    return head


@torch.no_grad()
def _fill(head: nn.Linear, folder: Path, name: str) -> bool:
    """Read a value head from a folder's tensors NAME.weight and, if there, NAME.bias. Whether it has one."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for part in {f"{name}.weight", f"{name}.bias"} & set(tensors.keys()):
                found[part.rpartition(".")[2]] = tensors.get_tensor(part)
    if "weight" not in found:
        log.info("critic.path=%s has no %s.weight: the value head is newly initialized", folder, name)
        return False
    weight, bias = found["weight"], found.get("bias", torch.zeros(1))
    if weight.shape != head.weight.shape or bias.shape != head.bias.shape:
        raise CheckpointError(
            f"critic.path={folder}: {name}.weight is {list(weight.shape)}, but the value head of this model is "
            f"{list(head.weight.shape)}; set critic.head to the head's name, or to null for a new head"
        )
    head.weight.copy_(weight)
    head.bias.copy_(bias)
    return True


def export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    path: Path | str,
    *,
    origin: Path | None = None,
    other: str = RUN_DIR,
) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` open.

    Written beside its place first and moved when complete; a folder that stood there is replaced by the move. origin:
    the folder that the model was read from; its layers of multi-token prediction are kept where the model has none.
    other: as for `file_error`.
    """
    beside, count = mtp.beside(model, origin)
    more: dict[str, Any] = {"state_dict": {**model.state_dict(), **beside}} if beside else {}
    with atomic_folder(Path(path), other=other) as folder:
        # transformers imports deepspeed here, if there is one, which logs to what is standard output then, for good:
        # that of `whet export` is the folder's name alone
        with mtp.counting(model, count), contextlib.redirect_stdout(sys.stderr), quiet_deepspeed():
            model.save_pretrained(folder, **more)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
            _check_tokenizer(tokenizer, folder, Path(path))


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, written: Path, path: Path) -> None:
    """Warn if transformers opens the tokenizer as another class that encodes differently.

    It does so for qwen2, whatever class the folder names.
    """
    again = AutoTokenizer.from_pretrained(written, local_files_only=True, trust_remote_code=False)
    text = decoded(tokenizer, range(min(len(tokenizer), 512)))
    if again(text)["input_ids"] != tokenizer(text)["input_ids"]:
        log.warning(
            "AutoTokenizer opens %s as %s, which encodes differently; open it with "
            "PreTrainedTokenizerFast.from_pretrained",
            path,
            type(again).__name__,
        )


# ---------------------------------------------------------------- from a folder


def examined(
    path: Path, cfg: schema.ModelConfig, *, vocab_size: int, names: tuple[str, str] = NAMES
) -> tuple[PreTrainedConfig, list[Head]]:
    """The config of a model's folder, and the heads of its files. Raises what `build` does before it reads weights."""
    key = names[0]
    _check_folder(path, key)
    files = heads(path)
    check_files(path, cfg.overrides, files, key=key, over=names[1])
    config = read_config(path, cfg.overrides, names)
    check_weights(path, files, key=key, named=getattr(config, "transformers_weights", None))
    rows = config.get_text_config().vocab_size
    if vocab_size > rows:
        raise ConfigError(
            f"{key}={path}: the tokenizer has {vocab_size} tokens, the embedding {rows} rows; "
            "use the tokenizer that belongs to the model"
        )
    return config, files


def _load(
    path: Path,
    cfg: schema.ModelConfig,
    config: PreTrainedConfig,
    files: list[Head],
    *,
    seed: int,
    dtype: torch.dtype,
    head: str | None,
    key: str,
) -> PreTrainedModel:
    told = config.get_text_config().to_dict()
    if dropped := [f"{name}={value}" for name, value in told.items() if _drops(name, value)]:
        log.info("%s: the model's own dropout is not applied (%s)", path, ", ".join(dropped))
    layers = getattr(config.get_text_config(), "num_hidden_layers", MOST_LAYERS)
    there = mtp.counted(files, layers)
    ahead = _ahead(path, cfg, there)
    # gpt-oss is published with experts in mxfp4: the policy has the same numbers in its own dtype
    four = (getattr(config, "quantization_config", None) or {}).get("quant_method") == "mxfp4"
    try:
        mtp.lengthen(config, min(ahead, there))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below with all the others
            output_loading_info=True,
            **({"quantization_config": Mxfp4Config(dequantize=True)} if four else {}),
        )
    except Exception as error:  # foreign code reading foreign files: it can fail in any way
        raise CheckpointError(f"{key}={path}: transformers cannot load it: {_told(error)}") from error
    model, report = loaded
    mtp.lengthen(model.config, -min(ahead, there))
    if four:  # else it would be written under the names of codes, without their scales
        model._weight_conversions = None
    found = {
        kind: {key if isinstance(key, str) else key[0] for key in report[f"{kind}_keys"]}
        for kind in ("missing", "unexpected", "mismatched")
    }
    if head is not None and f"{head}.weight" in found["unexpected"]:  # it stands for the output layer
        found["unexpected"] -= {f"{head}.weight", f"{head}.bias"}
        found["missing"] -= {"lm_head.weight"}
    found["unexpected"] -= names_of(found["unexpected"], layers)
    wrong = {kind: sorted(names) for kind, names in found.items() if names}
    if wrong:
        said = "; ".join(
            f"{kind}: {', '.join(names[:5])} ({len(names)} in all)" for kind, names in wrong.items()
        )
        raise CheckpointError(f"{key}={path}: the tensors do not match its {type(model).__name__}. {said}")
    if ahead:
        mtp.attach(model, ahead, seed=seed)
    elif getattr(model.config.get_text_config(), COUNT, 0):
        setattr(model.config.get_text_config(), COUNT, 0)
    if ahead and there:
        mtp.fill(model, path)
    elif there:
        log.info(
            "%s: %d layers of multi-token prediction are not loaded; exports have them unchanged", path, there
        )
    return model


def _ahead(path: Path, cfg: schema.ModelConfig, there: int) -> int:
    """How many layers of multi-token prediction the model of a folder is to have. there: those in its files."""
    if (made := mtp_of(cfg)) is None:
        return 0
    asked: int | None = made.settings["layers"]
    if there and asked not in (None, there):
        raise ConfigError(f"model.mtp.layers={asked}: {path} has {there}; leave it out")
    if not there and asked is None:
        raise ConfigError(
            f"model.mtp: {path} has no layers of multi-token prediction; give the number of new ones "
            "(model.mtp.layers), or a model that has them"
        )
    return asked or there


def _told(error: Exception) -> str:
    """What foreign code says, with the kind of its error where that is no message for people."""
    return str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"


def _check_folder(path: Path, key: str) -> None:
    if not path.is_dir():
        raise ConfigError(
            f"{key}={path}: no such folder; models are read from local Hugging Face folders{hub_hint(str(path))}"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{key}={path}: no config.json in it; {exported(path)}give the folder that holds it"
        )


def read_config(path: Path, overrides: dict[str, Any], names: tuple[str, str]) -> PreTrainedConfig:
    try:
        raw = read_json_object(path / "config.json", ConfigError)
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if not overrides:
            return config
        _check_known(config, overrides, raw, names)
        # put over the file, not over what was made of it: there a use_sliding_window=false has taken the window away
        return type(config).from_dict(over(raw, overrides))
    except ConfigError:
        raise
    except Exception as error:  # as above
        raise ConfigError(
            f"{names[0]}={path}: config.json (with {names[1]}) is not a valid config: {_told(error)}"
        ) from error


_ELSEWHERE = {"dtype": "model.dtype", "torch_dtype": "model.dtype", "model_type": "the weights ({path})"}
"""Keys of a config.json that are not the model's to be overridden, and what decides them."""
_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Names of kernels, which change no number that is not rounded."""
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta")


def _drops(name: str, value: Any) -> bool:
    """Whether an entry of a config.json says that a decoder has dropout."""
    own = name.endswith(("dropout", "dropout_prob", "pdrop")) and not name.startswith(
        ("classifier", "summary")
    )
    return own and isinstance(value, int | float) and value > 0


def _check_known(
    config: PreTrainedConfig, overrides: dict[str, Any], raw: dict[str, Any], names: tuple[str, str]
) -> None:
    """ConfigError for overrides without effect: transformers keeps any name. config: without them."""
    path, key = names
    for name, value in overrides.items():
        if name in _ELSEWHERE:
            raise ConfigError(
                f"{key}: {name} is decided by {_ELSEWHERE[name].format(path=path)}; leave it out"
            )
        if _drops(name, value):
            raise ConfigError(
                f"{key}: {name}={value}: no dropout of a model's own is applied, for sampling and training "
                "compute the same; leave it out (adapters may have some: model.lora.dropout)"
            )
        rotates = name in _ROPE and hasattr(config, "rope_parameters")
        if not (name in raw or rotates or hasattr(config, name) or name in _IMPLEMENTATIONS):
            raise ConfigError(f"{key}: {name} is not a key of a {config.model_type} config.json")


# ---------------------------------------------------------------- from scratch

_OF_THE_TOKENIZER = {"bos_token_id", "eos_token_id", "pad_token_id"}


def _scratch_config(cfg: schema.ModelConfig, *, vocab_size: int) -> PreTrainedConfig:
    for key, said in problems(cfg):
        raise ConfigError(f"{key}: {said}")
    if decided := sorted(_OF_THE_TOKENIZER & cfg.overrides.keys()):
        raise ConfigError(f"model.overrides: {decided[0]} of a new model is its tokenizer's; leave it out")
    tokens: dict[str, Any] = {"vocab_size": vocab_size, **dict.fromkeys(sorted(_OF_THE_TOKENIZER))}
    values = tokens | config_json(cfg)
    family = values.pop("model_type")
    if (values["vocab_size"] or 0) < vocab_size:
        raise ConfigError(
            f"model.overrides: vocab_size={values['vocab_size']}, but the tokenizer has {vocab_size} tokens; "
            "expected as many or more"
        )
    try:
        _check_known(AutoConfig.for_model(family), cfg.overrides, {}, NAMES)
        return AutoConfig.for_model(family, **values)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ConfigError(f"model.scratch: {family} rejects these sizes: {error}") from error


def _initialise(config: PreTrainedConfig, *, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """Random weights, drawn in float32 on the CPU, rounded to `dtype`. Leaves global random states alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seeds.key(seed, "model"))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if dtype != torch.float32:
        for tensor in model.parameters():
            tensor.data = tensor.data.to(dtype)
        model.config.dtype = dtype
    return model
