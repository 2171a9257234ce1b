"""A new model (`model.scratch`) as the config.json of its folder. The default sizes are small. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from whet.config.chosen import Chosen, setting_problems
from whet.config.functions import ARCHITECTURES
from whet.config.recipes import elsewhere
from whet.config.schema import ModelConfig
from whet.types import Json

KEY = "model.scratch"


def architecture(model: ModelConfig) -> Chosen:
    """The family of a new model, and its sizes as they are given."""
    return elsewhere(KEY, model.scratch)


def config_json(model: ModelConfig) -> dict[str, Json]:
    """The config.json of a new model, `model.overrides` put over it; the vocabulary comes from its tokenizer."""
    made = architecture(model)
    values = dict(made.settings)
    values["num_key_value_heads"] = values["num_key_value_heads"] or values["num_attention_heads"]
    values["head_dim"] = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
    values["intermediate_size"] = values["intermediate_size"] or 3 * values["hidden_size"]
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    if made.name == "gpt_oss":
        values["num_local_experts"] = values.pop("num_experts")
    elif "num_experts" in values:
        values |= {"moe_intermediate_size": values["intermediate_size"], "norm_topk_prob": True}
    return over({"model_type": made.name, **values}, model.overrides)


def over(config: Mapping[str, Json], overrides: Mapping[str, Json]) -> dict[str, Json]:
    """A config.json with `model.overrides` put over it: sections are joined, so that rope_parameters of a new kind keep
    their rope_theta. Rotary embeddings have the name there that the config.json has for them."""
    given = dict(overrides)
    section = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    for name in {"rope_parameters", "rope_scaling"} & given.keys():
        given[section] = given.pop(name)
    if "rope_theta" in given and "rope_theta" in (config.get("rope_parameters") or {}):
        given[section] = {**(given.get(section) or {}), "rope_theta": given.pop("rope_theta")}
    return {**config, **{name: _joined(config.get(name), value) for name, value in given.items()}}


def _joined(before: Json, value: Json) -> Json:
    if not isinstance(before, Mapping) or not isinstance(value, Mapping):
        return value
    return {**before, **{name: _joined(before.get(name), own) for name, own in value.items()}}


def problems(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) in a new model."""
    made = architecture(model)
    if wrong := list(setting_problems(KEY, made, ARCHITECTURES)):
        yield from wrong
        return
    s = made.settings
    heads, width = s["num_attention_heads"], s["hidden_size"]
    shared = s["num_key_value_heads"] or heads
    if heads % shared:
        good = ", ".join(str(d) for d in range(1, heads + 1) if heads % d == 0)
        said = f"{shared} does not divide num_attention_heads={heads}; these do: {good}"
        yield f"{KEY}.num_key_value_heads", said
    if s["head_dim"] is None and width % heads:
        yield KEY, f"num_attention_heads={heads} does not divide hidden_size={width}; give head_dim"
    head_dim = s["head_dim"] or width // heads
    if head_dim % 2:
        said = f"{head_dim} is odd; rotary position embeddings rotate pairs, so it must be even"
        yield f"{KEY}.head_dim", said
    if s.get("num_experts_per_tok", 0) > s.get("num_experts", 0):
        said = f"{s['num_experts_per_tok']} is more than num_experts={s['num_experts']}"
        yield f"{KEY}.num_experts_per_tok", said
