"""verl's data, rewards and rollouts as native keys. Each function takes all values of a file and gives one matter."""

from __future__ import annotations

from whet.config.urls import is_remote
from whet.dialects.megatron import drafting
from whet.dialects.row import NOTHING, Native, Values
from whet.dialects.served import NAMES, placed
from whet.dialects.typed import choices, choose
from whet.dialects.values import nested
from whet.dialects.verl.loop import schedule
from whet.dialects.verl.roles import (
    MTP,
    ROLLOUT,
    SERVERS,
    code,
    has_reward_model,
    samples,
    server_options,
    texts,
)
from whet.dialects.verl.sizes import engine_devices, prompts, responses, steps_of_a_version
from whet.dialects.versions import since
from whet.types import ConfigError, Json


def nothing(v: Values) -> Native:
    """A section: its keys count, each for itself."""
    return NOTHING


# ---------------------------------------------------------------- data


def training(v: Values) -> Native:
    """All files one after the other, as one source in verl's columns; or a dataset class of yours over them."""
    return _source(v, "train", "data.train.0")


def _source(v: Values, which: str, native: str) -> Native:
    return {
        **rows(v, which, native),
        f"{native}.prompt": v["data.prompt_key"],
        f"{native}.answer": "reward_model.ground_truth",
        f"{native}.label": v["data.reward_fn_key"],
    }


def rows(v: Values, which: str, native: str) -> Native:
    """Where the rows come from: files, or what a class of yours makes of them; and how many of them."""
    key, most = f"data.{which}_files", v[f"data.{which}_max_samples"]
    files = texts(v, key)
    given = files if len(files) > 1 else files[0]
    some: Native = {f"{native}.limit": most} if most > 0 else NOTHING
    if v["data.custom_cls.path"] is None:
        return {f"{native}.path": given, **some}
    if remote := [path for path in files if is_remote(path)]:
        raise ConfigError(
            f"{key}: {remote[0]}: your class gets paths of this machine only; copy the file to this machine"
        )
    function = code(v, "data.custom_cls.path", "data.custom_cls.name")
    return {f"{native}.function": function, f"{native}.arguments": {"data_files": given}, **some}


def sampler(v: Values) -> Native:
    """A sampler of yours, which is given the rows and this section of the file."""
    return {
        "data.order": "whet.data.samplers:verl",
        "data.order.class_path": code(v, "data.sampler.class_path", "data.sampler.class_name"),
        "data.order.config": section(v, "data"),
    }


def section(v: Values, name: str) -> dict[str, Json]:
    """The values of a section and of those in it, as a tree without nulls."""
    flat: dict[tuple[str | int, ...], Json] = {}
    for key, value in v.items():
        if key.startswith(f"{name}.") and value not in (None, {}):
            *above, last = key.removeprefix(f"{name}.").split(".")
            inside = value if last == "*" else {last: value}
            flat |= {(*above, each): given for each, given in inside.items()}
    return nested(flat)


def validates(v: Values) -> bool:
    """Whether verl would validate at any time."""
    return bool(v["trainer.test_freq"] > 0 or v["trainer.val_before_train"])


def validation(v: Values) -> Native:
    """Every test_freq steps and after the last, if it is above 0; before the first if val_before_train."""
    every = v["trainer.test_freq"] * steps_of_a_version(v)
    out = {
        **_source(v, "val", "data.eval.0"),
        "data.exclude_eval": False,
        "eval.interval": max(every, 0),
        "eval.at_start": v["trainer.val_before_train"],
        "eval.at_end": every > 0,
        **_penalty(v, "eval"),
    }
    at = f"{ROLLOUT}.val_kwargs"
    if not samples(v, f"{at}.do_sample") or v[f"{at}.temperature"] == 0:
        return out | {"eval.samples": 1}
    chosen = {f"eval.sampling.{key}": value for key, value in _sampling(v, at).items()}
    return out | {"eval.samples": v[f"{at}.n"]} | chosen


# ---------------------------------------------------------------- rewards


def judge(v: Values) -> Native:
    """A function of yours, or verl's table by data source."""
    if v["custom_reward_function.path"] is None:
        arguments = _gsm8k(v) | ({"elsewhere": program_sources(v)} if runs_code(v) else {})
        given = {"rewards.score.arguments": arguments} if arguments else {}
        return {"rewards.score.function": "whet.rewards.verl:compute_score", **given}
    at = "custom_reward_function"
    return {"rewards.score.function": code(v, f"{at}.path", f"{at}.name", "compute_score")}


def _gsm8k(v: Values) -> dict[str, Json]:
    """Which number of a reply is judged. Releases differ."""
    if since(v, "verl", "0.5.0"):
        return {}  # the reward's defaults
    found = "last" if since(v, "verl", "0.4.1") else "first"
    return {"gsm8k_found": found, "gsm8k_characters": None}


def program_sources(v: Values) -> list[str]:
    """Data sources whose replies are programs."""
    return ["codecontests", "apps", "codeforces", "taco"]


def runs_code(v: Values) -> bool:
    """Whether a service runs programs; a function of yours and a reward model leave it out."""
    given = v.get("reward_model.sandbox_fusion.url") and v["custom_reward_function.path"] is None
    return bool(given) and not has_reward_model(v)


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
        out["rewards.score.arguments"] = {**out.get("rewards.score.arguments", {}), **arguments}
    manager = "reward_model.reward_manager"
    if v[manager] is not None and choose(v, manager, choices("verl", "reward manager")) == "prime":
        out |= {"reward_workers.count": 4, "reward_workers.timeout_s": 300.0}
    return out


# ---------------------------------------------------------------- rollouts


def engine(v: Values) -> Native:
    """The embedded engine stands in for all of them; a file with an option that only the engine itself knows gets that
    engine, with these options."""
    name = choose(v, f"{ROLLOUT}.name", {**SERVERS, "hf": "native", "trtllm": "native"})
    options = server_options(v)
    return {"rollout.engine": name if options else "native"} | (_server(v, name) if name in NAMES else {})


def _server(v: Values, name: str) -> dict[str, Json]:
    """verl's engines as one server, which sleeps while the devices that it shares with the trainer compute."""
    tp, pp, ep = (
        int(v.get(f"{ROLLOUT}.{size}_parallel_size") or 1)
        for size in ("tensor_model", "pipeline_model", "expert")
    )
    shares = bool(v["actor_rollout_ref.hybrid_engine"]) and not v[f"{ROLLOUT}.nnodes"]
    return placed(
        name,
        tp=tp,
        pp=pp,
        dp=engine_devices(v) // (tp * pp),
        ep=ep,
        memory=v[f"{ROLLOUT}.gpu_memory_utilization"],
        more=_options(v, name),
        sleeps=shares
        and bool(v[f"{ROLLOUT}.free_cache_engine"])
        and bool(v.get(f"{ROLLOUT}.enable_sleep_mode", True))
        and schedule(v) == NOTHING,
    )


def _options(v: Values, name: str) -> dict[str, Json]:
    """The file's own options of its engine, and those with which it drafts."""
    own = server_options(v)
    drafts = drafting(v, MTP, name, own.get("speculative_config"))
    return drafts | {option: value for option, value in own.items() if option.replace("_", "-") not in drafts}


def concurrency(v: Values) -> Native:
    """Never more rows of cache than a step has rollouts."""
    return {"rollout.max_num_seqs": min(v[f"{ROLLOUT}.max_num_seqs"], prompts(v) * responses(v))}


def sampling(v: Values) -> Native:
    """n responses by the sampling keys; do_sample=False, where it is read, is one greedy response."""
    out: dict[str, Json] = {"rollout.group_size": responses(v)}
    greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    chosen = _sampling(v, ROLLOUT) if samples(v, f"{ROLLOUT}.do_sample") else greedy
    return out | {f"rollout.sampling.{key}": value for key, value in chosen.items()} | _penalty(v, "rollout")


def _penalty(v: Values, section: str) -> dict[str, Json]:
    """repetition_penalty is the engine's, in training and in validation."""
    penalty = v[f"{ROLLOUT}.repetition_penalty"]
    return {f"{section}.sampling.repetition_penalty": penalty} if penalty != 1 else {}


def _sampling(v: Values, at: str) -> dict[str, Json]:
    """-1 (vLLM) and 0 (hf) both mean no top_k."""
    return {
        "temperature": v[f"{at}.temperature"],
        "top_k": max(v[f"{at}.top_k"], 0),
        "top_p": v[f"{at}.top_p"],
    }
