"""verl's values as native ones. Each function takes all values of a file and gives the native keys of one matter."""

from __future__ import annotations

from whet.config.faults import shown
from whet.config.urls import is_remote
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.typed import choose, flag, number, whole
from whet.dialects.verl.rules import (
    ANY,
    MODEL,
    NOTHING,
    ROLLOUT,
    Native,
    anywhere,
    has_critic,
    has_reward_model,
    local,
    responses,
    texts,
    validates,
)
from whet.types import ConfigError, Json


def nothing(v: Values) -> Native:
    """A section: its keys count, each for itself."""
    return NOTHING


# ---------------------------------------------------------------- data and rewards


def training_data(v: Values) -> Native:
    """All files one after the other, as one source in verl's columns; or a dataset class of yours over them."""
    return _source(v, "data.train_files", "data.train.0")


def _source(v: Values, key: str, native: str) -> Native:
    return {
        **rows(v, key, native),
        f"{native}.prompt": v["data.prompt_key"],
        f"{native}.answer": "reward_model.ground_truth",
        f"{native}.label": v["data.reward_fn_key"],
    }


def rows(v: Values, key: str, native: str) -> Native:
    """Where the rows come from: files, or what a class of yours makes of them."""
    files = texts(v, key)
    given = files if len(files) > 1 else files[0]
    if v["data.custom_cls.path"] is None:
        return {f"{native}.path": given}
    if remote := [path for path in files if is_remote(path)]:
        raise ConfigError(
            f"{key}: {remote[0]}: a class of yours is given paths of this machine; copy the file here"
        )
    if not isinstance(v["data.custom_cls.name"], str):
        raise ConfigError("data.custom_cls.path needs data.custom_cls.name, the class in that file")
    function = f"{local(v, 'data.custom_cls.path')}:{v['data.custom_cls.name']}"
    return {f"{native}.function": function, f"{native}.arguments": {"data_files": given}}


def overlong(v: Values) -> Native:
    """filter_overlong_prompts drops what truncation would cut or refuse."""
    known = {
        "error": "error",
        "left": "truncate_left",
        "right": "truncate_right",
        "middle": "truncate_middle",
    }
    kept = choose(v, "data.truncation", known)
    return {"data.overlong": "filter" if flag(v, "data.filter_overlong_prompts") else kept}


def order(v: Values) -> Native:
    return {"data.order": "shuffle" if flag(v, "data.shuffle") else "sequential"}


def judge(v: Values) -> Native:
    """A function of yours, or verl's table by data source."""
    if v["custom_reward_function.path"] is None:
        return {"rewards.score.function": "whet.rewards.verl:compute_score"}
    path, name = local(v, "custom_reward_function.path"), v["custom_reward_function.name"]
    return {"rewards.score.function": f"{path}:{name}"}


def rewards(v: Values) -> Native:
    """What judges, and how: `prime` gives several processes, and each call 300 s.

    Beside a reward model verl asks a function of yours in validation alone; here it is measured in training, too.
    """
    out: dict[str, Json] = {}
    if has_reward_model(v):
        if v["custom_reward_function.path"] is None:
            return out
        out |= {"rewards.score.weight": 0.0} | ({"eval.reward": "score"} if validates(v) else {})
    out |= judge(v)
    if arguments := v["custom_reward_function.reward_kwargs"]:
        out["rewards.score.arguments"] = arguments
    known = {"naive": "naive", "prime": "prime", "batch": None, "dapo": "naive"}
    if choose(v, "reward_model.reward_manager", known) == "prime":
        out |= {"guard.workers": 4, "guard.timeout_s": 300.0}
    return out


def overlong_penalty(v: Values) -> Native:
    """DAPO's soft penalty: 0 up to `len` tokens before the limit, from there in a line to -penalty_factor at it."""
    at = "reward_model.overlong_buffer"
    if not v[f"{at}.enable"]:
        return NOTHING
    if has_reward_model(v):
        raise ConfigError(
            f"{at}.enable=True: beside a reward model verl pays its score alone; set it to False"
        )
    limit, buffer = whole(v, "data.max_response_length"), whole(v, f"{at}.len")
    return {
        "rewards.overlong.function": "overlong",
        "rewards.overlong.weight": number(v, f"{at}.penalty_factor"),
        "rewards.overlong.arguments": {"max_tokens": limit, "buffer": buffer},
    }


# ---------------------------------------------------------------- model


def model_path(v: Values) -> Native:
    return {"model.path": anywhere(v, f"{MODEL}.path")}


def critic_path(v: Values) -> Native:
    """Where the value model's weights start; read where a critic learns."""
    return {"critic.path": anywhere(v, "critic.model.path")} if has_critic(v) else NOTHING


def critic_tokenizer(v: Values) -> Native:
    """Policy and critic read the same tokens, so the critic's tokenizer is the policy's."""
    key = "critic.model.tokenizer_path"
    same = (v[f"{MODEL}.path"], v["critic.model.path"], v["data.tokenizer"])
    if has_critic(v) and v[key] not in same:
        raise ConfigError(
            f"{key}={shown(v[key])} must be the policy's tokenizer, {shown(v[f'{MODEL}.path'])}"
        )
    return NOTHING


def overrides(v: Values) -> Native:
    """Flat fields (FSDP's form) and those of model_config (Megatron's), over the model's own config."""
    flat, nested = v.get(f"{MODEL}.override_config.*") or {}, v[f"{MODEL}.override_config.model_config"] or {}
    for key in flat.keys() & nested.keys():
        if flat[key] != nested[key]:
            raise ConfigError(f"{MODEL}.override_config: {key} stands in it twice, keep one")
    return {"model.overrides": {**nested, **flat}}


def trainable(v: Values) -> Native:
    """The routers of a mixture of experts learn, or stay as they are."""
    frozen = flag(v, f"{MODEL}.override_config.moe_config.freeze_moe_router")
    return {"train.trainable": {r"\.mlp\.gate\.": False}} if frozen else NOTHING


def _without_sections(config: dict[str, Json]) -> dict[str, Json]:
    """Megatron's form of overrides made flat; a moe_config that switches nothing on goes."""
    inner, moe = (config.get(name) or {} for name in ("model_config", "moe_config"))
    if not isinstance(inner, dict) or not isinstance(moe, dict):
        raise ConfigError("critic.model.override_config: model_config and moe_config are sections of keys")
    if any(moe.values()):
        raise NotSupportedYet(
            "critic.model.override_config.moe_config: a critic of which only a part learns is coming, not built yet"
        )
    rest = {key: value for key, value in config.items() if key not in ("model_config", "moe_config")}
    return {**rest, **inner}


def hydra_defaults(v: Values) -> Native:
    """The file that this one starts from: verl's own, whose values stand in the table."""
    given = v["defaults"] if isinstance(v["defaults"], list) else [v["defaults"]]
    if other := [name for name in given if name not in ("ppo_trainer", "ppo_megatron_trainer", "_self_")]:
        raise ConfigError(
            f"defaults: {shown(other[0])} is not read (ppo_trainer and ppo_megatron_trainer are what a file leaves "
            "out); give one file with everything in it"
        )
    return NOTHING


def critic_overrides(v: Values) -> Native:
    """The critic's own, in both forms: empty is none, whatever the policy has."""
    if not has_critic(v):
        return NOTHING
    return {"critic.overrides": _without_sections(v["critic.model.override_config"] or {})}


# ---------------------------------------------------------------- rollouts and validation


def engine(v: Values) -> Native:
    """The embedded engine stands in for all of them."""
    known = dict.fromkeys(("vllm", "sglang", "sglang_async", "hf"), "native") | {"trtllm": None}
    return {"rollout.engine": choose(v, f"{ROLLOUT}.name", known)}


def dtype(v: Values) -> Native:
    """The engine reads the trainer's own weights. bfloat16 is left to the device (float32 on a CPU)."""
    known = {"bfloat16": "bfloat16", "float32": "float32", "float16": None}
    wanted = choose(v, f"{ROLLOUT}.dtype", known)
    return {} if wanted == "bfloat16" else {"model.dtype": wanted}


def concurrency(v: Values) -> Native:
    """Never more rows of cache than a step has rollouts."""
    most = whole(v, f"{ROLLOUT}.max_num_seqs")
    return {"rollout.max_batch": min(most, whole(v, "data.train_batch_size") * responses(v))}


def sampling(v: Values) -> Native:
    """n responses by the sampling keys; do_sample=False is one greedy response, whatever they say."""
    out = {"rollout.group_size": responses(v)}
    greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    chosen = _sampling(v, ROLLOUT) if flag(v, f"{ROLLOUT}.do_sample") else greedy
    return out | {f"rollout.sampling.{key}": value for key, value in chosen.items()}


def _sampling(v: Values, at: str) -> dict[str, Json]:
    """-1 (vLLM) and 0 (hf) both mean no top_k."""
    top_k = whole(v, f"{at}.top_k", least=-1)
    return {
        "temperature": number(v, f"{at}.temperature"),
        "top_k": max(top_k, 0),
        "top_p": number(v, f"{at}.top_p"),
    }


def validation(v: Values) -> Native:
    """Every test_freq steps and after the last, if it is above 0; before the first if val_before_train."""
    if not validates(v):
        return NOTHING
    every = whole(v, "trainer.test_freq", least=ANY)
    out = {
        **_source(v, "data.val_files", "data.eval.0"),
        "data.exclude_eval": False,
        "eval.every": max(every, 0),
        "eval.at_start": flag(v, "trainer.val_before_train"),
        "eval.at_end": every > 0,
    }
    at = f"{ROLLOUT}.val_kwargs"
    if not flag(v, f"{at}.do_sample") or number(v, f"{at}.temperature") == 0:
        return out | {"eval.samples": 1}
    chosen = {f"eval.sampling.{key}": value for key, value in _sampling(v, at).items()}
    return out | {"eval.samples": whole(v, f"{at}.n")} | chosen
