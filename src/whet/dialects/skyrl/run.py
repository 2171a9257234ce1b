"""SkyRL's values of data, batches, sampling, engines, checkpoints and records as native ones.

Each function takes all values of a file and gives the native keys of one matter.
"""

from __future__ import annotations

from pathlib import PurePath

from whet.config.faults import shown
from whet.config.sections.data import RANDOM_TOKENS
from whet.dialects.megatron import drafting_of_vllm
from whet.dialects.row import NOTHING, Native, NotSupportedYet, Values
from whet.dialects.served import placed
from whet.dialects.skyrl import arctic
from whet.dialects.skyrl.devices import PLACE, data_parallel, has_critic, is_simulated, since
from whet.dialects.skyrl.learn import input_length
from whet.dialects.typed import choices, choose
from whet.types import ConfigError, Json

# ---------------------------------------------------------------- data and rewards


def is_trial(v: Values) -> bool:
    """Whether the file is of SkyRL's example that fills whole contexts (main_full_ctx of 0.2 to main): some steps on
    made-up rows, without an evaluation or a checkpoint."""
    return v.get("trainer.num_dummy_steps") is not None


def training_data(v: Values) -> Native:
    """All files one after the other, as one source: every row counts the same."""
    if is_trial(v):
        made = {"rows": v["trainer.train_batch_size"], "prompt": input_length(v)}
        return {"data.train.0.function": RANDOM_TOKENS, "data.train.0.arguments": made}
    return {"data.train.0.path": _files(v, "data.train_data")} | dict(_columns(v, "data.train.0"))


def evaluation(v: Values) -> Native:
    """Each file is a source of its own; nothing at all where eval_interval or val_data switch it off."""
    files = _files(v, "data.val_data")
    stems = [PurePath(f).stem for f in files]
    out: dict[str, Json] = {}
    for n, (file, stem) in enumerate(zip(files, stems)):
        name, at = stem if stems.count(stem) == 1 else file, f"data.eval.{n}"
        out |= {f"{at}.name": name, f"{at}.path": file, **_columns(v, at)}
    own, trained = _sampling(v, EVAL, "eval.sampling"), _sampling(v, TRAIN, "eval.sampling")
    inherited = {key: value for key, value in OFF.items() if key in trained}
    out |= {**inherited, **own, **_unset(v)}
    return out | ({"eval.samples": 1} if out["eval.sampling.temperature"] == 0 and not plays(v) else {})


EVAL, TRAIN = "generator.eval_sampling_params", "generator.sampling_params"
OFF: Native = {
    "eval.sampling.min_tokens": 0,
    "eval.sampling.stop": [],
    "eval.sampling.stop_token_ids": [],
    "eval.sampling.ignore_eos": False,
}
"""Parameters that an evaluation would take from training; in SkyRL it has its own alone."""


def _unset(v: Values) -> Native:
    """From 0.1 on a section that is left out is greedy and as long as in training; one that is given in part has
    defaults of its own."""
    if not since(v, "0.1") or v[EVAL]:
        return NOTHING
    return {"eval.sampling.temperature": 0.0, "eval.sampling.max_tokens": v[f"{TRAIN}.max_generate_length"]}


ANSWERS = {
    "gsm8k": "reward_spec.ground_truth",
    "aime": "reward_model.ground_truth",
    "lcb": "reward_spec.ground_truth",
}
"""Environments of SkyRL-Gym that judge a single reply by its text, and the column of the answer."""
PLAYED = ("gsm8k_multi_turn", "text2sql", "search", "llm_as_a_judge")
"""Other environments of SkyRL-Gym: they are played by their own code (`whet.envs.skyrl_gym`)."""


def names(v: Values) -> str:
    """The environments of SkyRL-Gym that there are here."""
    return ", ".join((*ANSWERS, *PLAYED))


def is_yours(v: Values) -> bool:
    """Whether a function or a class of yours judges or plays."""
    name = v["environment.env_class"]
    return isinstance(name, str) and ":" in name


def plays(v: Values) -> bool:
    """Whether an environment of SkyRL-Gym's shape plays: one that is played by its own code, or a class of yours."""
    name = v["environment.env_class"]
    return not is_trial(v) and (name in PLAYED or (is_yours(v) and several_turns(v)))


def arguments(v: Values) -> dict[str, Json]:
    """Of an environment of SkyRL-Gym's shape."""
    name = v["environment.env_class"]
    own = (v["environment.skyrl_gym.*"] or {}).get(name) or {}
    return {"env": name, "max_turns": v["generator.max_turns"], **own}


def history(v: Values) -> str:
    """Whether turns are messages, and whether what was thought earlier stays in them."""
    if not v["generator.use_conversation_multi_turn"]:
        return "inline"
    drops_thoughts = v["generator.chat_template.name_or_path"] == "qwen3_without_thinking"
    return "template" if v["generator.step_wise_trajectories"] or drops_thoughts else "append"


def _columns(v: Values, source: str) -> Native:
    """The column of the answer, which depends on the environment; a function of yours is given all columns. A row that
    names another environment is not for this one: SkyRL would play that."""
    name = v["environment.env_class"]
    answer = {f"{source}.answer": ANSWERS[name]} if name in ANSWERS else {}
    return answer | ({f"{source}.expect": {"env_class": name}} if name in (*ANSWERS, *PLAYED) else {})


def _files(v: Values, key: str) -> list[str]:
    value = v[key]
    files = [value] if isinstance(value, str) else value
    if not files or not all(isinstance(f, str) for f in files):
        raise ConfigError(f"{key}: got {shown(value)}, expected a list of files")
    return list(files)


# ---------------------------------------------------------------- steps and batches


def batches(v: Values) -> Native:
    """B prompts a step in B / mini optimizer steps, with ArcticRL in one; micro-batches as large as those of one of
    SkyRL's GPUs."""
    whole = arctic.trains(v)
    for role in ("policy", "critic") if has_critic(v) else ("policy",):
        if not whole:
            _check_mini_batch(v, role)
    B, tokens = v["trainer.train_batch_size"], v["trainer.max_tokens_per_microbatch"]
    minis = 1 if whole else B // v["trainer.policy_mini_batch_size"]
    out = {"train.tasks_per_step": B, "train.minibatches": minis}
    if tokens > 0:
        out |= {"train.micro_batch_tokens": tokens, "train.forward_micro_batch_tokens": tokens}
    else:
        out |= {
            "train.micro_batch_rollouts": v["trainer.micro_train_batch_size_per_gpu"],
            "train.forward_micro_batch_rollouts": v["trainer.micro_forward_batch_size_per_gpu"],
        }
    if has_critic(v):
        out["critic.minibatches"] = B // v["trainer.critic_mini_batch_size"]
    return out


def _check_mini_batch(v: Values, role: str) -> None:
    """B >= mini, mini | B, m = mini k / dp >= 1, micro | m, m | B k / dp; k rollouts of a prompt.

    Divisions are rounded down, as there. Where they round, SkyRL's optimizer steps are smaller and more than its
    document says; here they are as it says.
    """
    B, k = v["trainer.train_batch_size"], v["generator.n_samples_per_prompt"]
    key, dp = f"trainer.{role}_mini_batch_size", data_parallel(v, role)
    mini, micro = v[key], v["trainer.micro_train_batch_size_per_gpu"]
    if mini > B:
        raise ConfigError(f"trainer.train_batch_size={B} must be at least {key}={mini}")
    if B % mini:
        raise ConfigError(f"{key}={mini} must divide trainer.train_batch_size={B}")
    own, batch = mini * k // dp, B * k // dp
    rank = f"{key}={mini} * generator.n_samples_per_prompt={k} / {dp} ranks of the {role}"
    if own == 0:
        raise ConfigError(f"{rank} leaves a rank no rollout ({PLACE}.{role}_num_*)")
    if own % micro and v["trainer.max_tokens_per_microbatch"] <= 0:
        raise ConfigError(
            f"trainer.micro_train_batch_size_per_gpu={micro} must divide the mini batch of a rank, {own} = {rank}"
        )
    if batch % own:
        raise ConfigError(f"a rank's mini batch, {own} = {rank}, must divide its batch of {batch} rollouts")


def several_turns(v: Values) -> bool:
    return bool(v["generator.max_turns"] > 1)


# ---------------------------------------------------------------- sampling and engines


def training_sampling(v: Values) -> Native:
    """Sampling of training rollouts; of a trial every reply is as long as can be."""
    native = "rollout.sampling"
    out = _sampling(v, TRAIN, native)
    ends = (f"{native}.stop", f"{native}.stop_token_ids")
    kept = {key: value for key, value in out.items() if key not in ends}
    return kept | {f"{native}.ignore_eos": True} if is_trial(v) else out


PASSED = ("repetition_penalty", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
"""Parameters of vLLM that are the same here, name and meaning."""


def _sampling(v: Values, given: str, native: str) -> Native:
    """One section of sampling parameters; top_k -1 is off, which is 0 here."""
    top_k = v[f"{given}.top_k"]
    more = {**(v[f"{given}.*"] or {}), **(v[f"{given}.additional_kwargs"] or {})}
    more |= {"stop": v[f"{given}.stop"]} if v[f"{given}.stop"] is not None else {}
    penalty = v[f"{given}.repetition_penalty"]
    more |= {"repetition_penalty": penalty} if penalty != 1 else {}
    if top_k == 0:
        raise ConfigError(f"{given}.top_k=0 keeps no token; write -1 for no limit")
    if strange := sorted(more.keys() - set(PASSED) - {"logprobs"}):
        raise NotSupportedYet(
            f"{given}: {strange[0]} is handed on to vLLM, which is coming; of such parameters these work today: "
            f"{', '.join(PASSED)}"
        )
    return {
        f"{native}.max_tokens": v[f"{given}.max_generate_length"],
        f"{native}.temperature": v[f"{given}.temperature"],
        f"{native}.top_p": v[f"{given}.top_p"],
        f"{native}.min_p": v[f"{given}.min_p"],
        f"{native}.top_k": max(top_k, 0),
        **{f"{native}.{name}": more[name] for name in PASSED if more.get(name) is not None},
    }


def rollout_engine(v: Values) -> Native:
    """SkyRL's engines as one server."""
    if not v["generator.run_engines_locally"]:
        return {}
    tp, pp, dp, ep = (
        int(v.get(f"generator.inference_engine_{kind}_parallel_size") or 1)
        for kind in ("tensor", "pipeline", "data", "expert")
    )
    return placed(
        v["generator.backend"],
        tp=tp,
        pp=pp,
        dp=v["generator.num_inference_engines"] * dp,
        ep=ep,
        memory=v["generator.gpu_memory_utilization"],
        more=_drafting(v) | v["generator.engine_init_kwargs.*"],
    )


def _drafting(v: Values) -> dict[str, Json]:
    """vLLM's option by which layers of multi-token prediction draft, where the file has none of its own."""
    if not v.get("trainer.mtp.enabled") or v["generator.inference_engine.speculative_config"]:
        return {}
    return drafting_of_vllm("mtp", v["trainer.mtp.num_speculative_tokens"])


def urls(v: Values) -> list[Json]:
    """The servers that somebody else has started, as addresses. Where no weights are sent to them, a proxy before them
    stands for all."""
    alone = v.get("generator.external_proxy_url")
    if alone and is_simulated(v):
        return [_address(alone)]
    older = [alone] if alone else v["generator.remote_inference_engine_urls"]
    if not (given := v["generator.external_server_urls"] or older):
        raise ConfigError(
            "generator.run_engines_locally=false: give the servers as generator.external_server_urls or "
            "generator.remote_inference_engine_urls"
        )
    return [_address(url) for url in given]


def proxy(v: Values) -> Json:
    """The proxy before those servers; alone it is a server itself, as in SkyRL since train-0.4."""
    url = v.get("generator.external_proxy_url")
    return _address(url) if url and v["generator.external_server_urls"] and not is_simulated(v) else None


def _address(url: str) -> str:
    return url if "://" in url else f"http://{url}"


# ---------------------------------------------------------------- checkpoints and tracking


def exports(v: Values) -> str:
    """The folder of a run's exports."""
    return str(_exports(v) / v["trainer.project_name"] / v["trainer.run_name"])


def _exports(v: Values) -> PurePath:
    """export_path; none where its default could not be read (no HOME), which is told for itself."""
    return PurePath(v["trainer.export_path"] or "")


def trackers(v: Values) -> Native:
    """Those that are named, and jsonl always; words by which W&B finds the run."""
    given, tags = v["trainer.logger"], v["trainer.tags"]
    names = given if isinstance(given, list) else [given]
    chosen = [
        choose({"trainer.logger": name}, "trainer.logger", choices("skyrl", "tracker")) for name in names
    ]
    return {"track.trackers": [*dict.fromkeys(chosen), "jsonl"], **({"track.tags": tags} if tags else {})}


def dump(v: Values) -> Native:
    """Every step's batch, token by token, and every evaluation, at their places below export_path."""
    root, out = _exports(v), dict[str, Json]()
    if v["trainer.dump_data_batch"]:
        name = "global_step_{step}_training_input.parquet"
        out |= {"track.batches_interval": 1, "track.dump.batches": str(root / "dumped_data" / name)}
    if v["trainer.dump_eval_results"]:
        folder = root / "dumped_eval" / "global_step_{step}_eval_results"
        out["track.dump.eval"] = str(folder / "{source}.jsonl")
    return out
