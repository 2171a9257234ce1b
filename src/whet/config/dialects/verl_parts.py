"""verl's values as native ones. Each function takes all values of a file and gives the native keys of one matter."""

from __future__ import annotations

from whet.config.dialects.key import Values
from whet.config.dialects.typed import choose, flag, number, whole
from whet.config.dialects.verl_rules import (
    ACTOR,
    ALL,
    ANY,
    MODEL,
    NOTHING,
    ROLLOUT,
    Native,
    has_critic,
    here,
    is_megatron,
    local,
    responses,
    texts,
    validates,
)
from whet.config.faults import shown
from whet.types import ConfigError, Json


def nothing(v: Values) -> Native:
    """A section: its keys count, each for itself."""
    return NOTHING


# ---------------------------------------------------------------- data and rewards


def training_data(v: Values) -> Native:
    """All files one after the other, as one source in verl's columns."""
    return _source(v, "data.train_files", "data.train.0")


def _source(v: Values, key: str, native: str) -> Native:
    files = [here(path, key=key) for path in texts(v, key)]
    return {
        f"{native}.path": files if len(files) > 1 else files[0],
        f"{native}.prompt": v["data.prompt_key"],
        f"{native}.answer": "reward_model.ground_truth",
        f"{native}.label": v.get("data.reward_fn_key", "data_source"),
    }


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


def seed(v: Values) -> Native:
    return NOTHING if v["data.seed"] is None else {"seed": whole(v, "data.seed", least=0)}


def rewards(v: Values) -> Native:
    """A function of yours, or verl's table by data source; `prime` gives several processes, and each call 300 s."""
    path, name = v["custom_reward_function.path"], v["custom_reward_function.name"]
    if path is not None:
        function = f"{local(v, 'custom_reward_function.path')}:{name}"
    else:
        function = "whet.rewards.verl:compute_score"
    out: dict[str, Json] = {"rewards.score.function": function}
    if arguments := v.get("custom_reward_function.reward_kwargs"):
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
    limit, buffer = whole(v, "data.max_response_length"), whole(v, f"{at}.len")
    return {
        "rewards.overlong.function": "overlong",
        "rewards.overlong.weight": number(v, f"{at}.penalty_factor"),
        "rewards.overlong.arguments": {"max_tokens": limit, "buffer": buffer},
    }


def no_reward_model(v: Values) -> Native:
    """The settings of a reward model are read only where there is one, so any value passes without one."""
    if flag(v, "reward_model.enable"):
        raise ConfigError(
            "reward_model.enable=True: reward models are coming, not built yet; today rewards are functions "
            "(custom_reward_function.path)"
        )
    return NOTHING


# ---------------------------------------------------------------- model


def model_path(v: Values) -> Native:
    return {"model.path": local(v, f"{MODEL}.path")}


def critic_path(v: Values) -> Native:
    """Where the value model's weights start; read where a critic learns."""
    return {"critic.path": local(v, "critic.model.path")} if has_critic(v) else NOTHING


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


def _without_sections(config: dict[str, Json]) -> dict[str, Json]:
    """Megatron's form of overrides made flat; a moe_config that switches nothing on goes."""
    inner, moe = config.get("model_config") or {}, config.get("moe_config") or {}
    rest = {key: value for key, value in config.items() if key not in ("model_config", "moe_config")}
    return {**rest, **inner} | ({"moe_config": moe} if any(moe.values()) else {})


def hydra_defaults(v: Values) -> Native:
    """The file that this one starts from: verl's own, whose values stand in the table."""
    given = v["defaults"] if isinstance(v["defaults"], list) else [v["defaults"]]
    known = ("ppo_trainer", "_self_", *(["ppo_megatron_trainer"] if is_megatron(v) else []))
    if other := [name for name in given if name not in known]:
        raise ConfigError(
            f"defaults: {shown(other[0])} is not read (ppo_trainer is what a file leaves out, ppo_megatron_trainer "
            f"needs {ACTOR}.strategy=megatron); give one file with everything in it"
        )
    return NOTHING


def critic_overrides(v: Values) -> Native:
    """The critic is built with the policy's overrides: none of its own, or the same."""
    own = _without_sections(v["critic.model.override_config"])
    if has_critic(v) and own and own != overrides(v)["model.overrides"]:
        raise ConfigError(
            f"critic.model.override_config={shown(own)}: other overrides than the policy's are coming, not built yet"
        )
    return NOTHING


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


# ---------------------------------------------------------------- algorithm

COMING = (
    "remax",
    "opo",
    "grpo_passk",
    "gpg",
    "grpo_vectorized",
    "rloo_vectorized",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)


def advantage(v: Values) -> Native:
    """The estimator by its formula, over the recipe that comes nearest; verl's loss is always PPO's."""
    known = {
        "gae": "ppo",
        "grpo": "grpo",
        "reinforce_plus_plus": "reinforce",
        "reinforce_plus_plus_baseline": "grpo",
        "rloo": "rloo",
        "reward": "reinforce",
        "none": "reinforce",
    }
    estimator = v["algorithm.adv_estimator"]
    name = choose(v, "algorithm.adv_estimator", known | dict.fromkeys(COMING))
    if name in ("grpo", "rloo") and responses(v) == 1:
        return _alone(v, str(estimator))
    if estimator == "reward":
        return _score(v, str(estimator))
    out: dict[str, Json] = {"algorithm.name": name, "algorithm.loss": "ppo"}
    if estimator == "grpo":
        out["algorithm.normalize_std"] = v.get("algorithm.norm_adv_by_std_in_grpo", True)
    elif estimator == "reinforce_plus_plus_baseline":
        out |= {"algorithm.normalize_std": False, "algorithm.whiten": True}
    elif estimator == "reinforce_plus_plus":
        out["algorithm.whiten"] = True
    elif estimator == "none":
        out["algorithm.advantage"] = "none"
    return out


def _alone(v: Values, estimator: str) -> Native:
    """A group of one has no mean and no deviation: the advantage is the score itself."""
    whitened = {"algorithm.whiten": True} if estimator == "reinforce_plus_plus_baseline" else {}
    return {**_score(v, estimator), **whitened}


def _score(v: Values, estimator: str) -> Native:
    """The whole score at every token, which is the undiscounted return as long as no token has a reward of its own."""
    if flag(v, "algorithm.use_kl_in_reward"):
        raise ConfigError(
            f"algorithm.adv_estimator={estimator} without a group (actor_rollout_ref.rollout.n=1) together with "
            "algorithm.use_kl_in_reward is coming, not built yet; raise n, or use use_kl_loss"
        )
    return {"algorithm.name": "reinforce", "algorithm.loss": "ppo"}


def dynamic_sampling(v: Values) -> Native:
    """DAPO drops groups whose rewards are all equal and asks for more."""
    at = "algorithm.filter_groups"
    if not v[f"{at}.enable"]:
        return NOTHING
    penalty = bool(v["reward_model.overlong_buffer.enable"])
    whole_reward = dict.fromkeys(("seq_reward", "seq_final_reward"), "reward")
    of_score = dict.fromkeys(("acc", "score"), None if penalty else "reward")
    choose(v, f"{at}.metric", whole_reward | of_score)
    most = whole(v, f"{at}.max_num_gen_batches", least=ANY)
    return {"algorithm.drop_uniform_groups": True, "algorithm.max_refills": most - 1 if most > 0 else ALL}


def discount(v: Values) -> Native:
    """gamma and lam, where an estimator discounts: lam in gae, gamma also in reinforce_plus_plus."""
    estimator = v["algorithm.adv_estimator"]
    gamma, lam = number(v, "algorithm.gamma"), number(v, "algorithm.lam")
    if estimator == "gae":
        return {"algorithm.gamma": gamma, "algorithm.lam": lam}
    return {"algorithm.gamma": gamma} if estimator == "reinforce_plus_plus" else NOTHING


def clipping(v: Values) -> Native:
    """clip_ratio on both sides unless low or high is given; the dual clip is always on."""
    ratio, low, high = (v.get(f"{ACTOR}.clip_ratio{side}") for side in ("", "_low", "_high"))
    return {
        "algorithm.clip_low": ratio if low is None else low,
        "algorithm.clip_high": ratio if high is None else high,
        "algorithm.dual_clip": v.get(f"{ACTOR}.clip_ratio_c", 3.0),
    }


NORM = "seq-mean-token-sum-norm"
REDUCTIONS = {name: name for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", NORM)}


def reduction(v: Values) -> Native:
    """Counts are those of the whole mini batch (verl's present rule), so no cut of it changes the gradient."""
    mode = choose(v, f"{ACTOR}.loss_agg_mode", REDUCTIONS)
    if mode != NORM:
        return {"algorithm.aggregation": mode}
    width = v.get(f"{ACTOR}.loss_scale_factor") or v["data.max_response_length"]
    return {"algorithm.aggregation": mode, "algorithm.norm_tokens": width}


def value_reduction(v: Values) -> Native:
    """The critic's loss is the mean over tokens."""
    if has_critic(v) and v["critic.loss_agg_mode"] != "token-mean":
        raise ConfigError(
            f"critic.loss_agg_mode={shown(v['critic.loss_agg_mode'])} is coming, not built yet: the critic's loss is "
            "the mean over tokens (token-mean)"
        )
    return NOTHING


ESTIMATORS: dict[str, str | None] = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "full": None,
}


def kl(v: Values) -> Native:
    """In the loss or in the reward, each with its own estimator and weight."""
    in_loss, in_reward = flag(v, f"{ACTOR}.use_kl_loss"), flag(v, "algorithm.use_kl_in_reward")
    if in_loss and in_reward:
        raise ConfigError(
            f"{ACTOR}.use_kl_loss and algorithm.use_kl_in_reward: both at once are coming, not built yet; choose one"
        )
    if in_loss:
        coef, estimator = number(v, f"{ACTOR}.kl_loss_coef"), choose(v, f"{ACTOR}.kl_loss_type", ESTIMATORS)
        return {"algorithm.kl.place": "loss", "algorithm.kl.coef": coef, "algorithm.kl.estimator": estimator}
    return _kl_in_reward(v) if in_reward else {"algorithm.kl.coef": 0.0}


def _kl_in_reward(v: Values) -> Native:
    out: dict[str, Json] = {
        "algorithm.kl.place": "reward",
        "algorithm.kl.coef": number(v, "algorithm.kl_ctrl.kl_coef"),
        "algorithm.kl.estimator": choose(v, "algorithm.kl_penalty", ESTIMATORS),
    }
    kinds = {"fixed": "fixed", "adaptive": "adaptive"}
    if choose(v, "algorithm.kl_ctrl.type", kinds) == "fixed":
        return out
    return out | {
        "algorithm.kl.target": number(v, "algorithm.kl_ctrl.target_kl"),
        "algorithm.kl.horizon": whole(v, "algorithm.kl_ctrl.horizon"),
    }
