"""The table of rules: every refusal is told where it is broken, and its condition reads as what it is."""

from __future__ import annotations

from collections import Counter
from string import Formatter
from typing import Any

import pytest

from whet.config.checks import hard_problems
from whet.config.conditions import in_words, met, no, parsed, subjects
from whet.config.constraints import BASE
from whet.config.facts import NAMED
from whet.config.keys import lookup, settings
from whet.config.load import load
from whet.config.rules import REFUSED, RULES, Rule
from whet.config.schema import Config

PPO = "algorithm.name=ppo"
MIX = ("algorithm.name=mix", "data.demonstrations=[{path: given.jsonl}]")
SDPO = ("algorithm.name=sdpo",)
PRIME = ("algorithm.name=prime",)
DISTILL = ("algorithm.name=distill", "reference.path=teacher")
TEACHERS = ("algorithm.kl.coef=0.1", "reference.models=[{path: a, values: [x]}]")
PARITY = "machine.logprob_parity=on"
ASYNC = "rollout.schedule=async"
LORA = "model.lora={}"
MTP = "model.mtp=cross_entropy"
VLLM = "rollout.engine=vllm"
ZERO = "train.engine=deepspeed"
ONLINE_DPO = "algorithm.name=online_dpo"
EVAL = "data.eval=[{path: test.jsonl}]"
RANKS = "train.parallel.dp_replicate=2"

BROKEN: dict[str, list[tuple[str, ...]]] = {
    "model": [("model.path=folder",), ("model.scratch=null",)],
    "tokenizer": [("tokenizer.path=folder",), ("tokenizer.build=null",)],
    "tokenizer.build": [("model={path: folder, scratch: null}",)],
    "checkpoint.export_as": [("model.lora={init: pissa}", "checkpoint.export_as=adapter")],
    "model.mtp": [
        (MTP, "model.lora={}"),
        (MTP, ZERO),
        (MTP, "train.parallel.tp=2"),
        (MTP, "train.parallel.cp=2"),
        (MTP, "train.parallel.pp=2"),
        (MTP, "train.parallel={dp_shard: 2, ep: 2}"),
        (MTP, ONLINE_DPO),
        (MTP, "train.router_aux_loss_coef=0.1"),
        (MTP, "train.router_z_loss_coef=0.1"),
        (MTP, "train.router_replay=old"),
    ],
    "model.lora.fused": [("model.lora={init: pissa_niter_4, fused: true}",)],
    "critic.lora.fused": [(PPO, "critic.lora={init: orthogonal, fused: true}")],
    "data.train": [("data.train=[]",), ("data.train=[]", "mode=train", ASYNC, "cluster.explorers=1")],
    "train.epochs": [("data.train=[]", "mode=train", ASYNC, "buffer.url=sqlite:///q", "train.epochs=2")],
    "data.order": [
        ("algorithm.name=sft", "data.order=adaptive"),
        ("mode=train", "rollout.schedule=async", "buffer.url=sqlite:///q", "data.order=adaptive"),
    ],
    "data.max_total_tokens": [("data.max_total_tokens=100", "data.max_prompt_tokens=100")],
    "data.eval": [(EVAL, "eval.at_start=false", "eval.at_end=false"), ("mode=eval",)],
    "data.demonstrations": [("algorithm.name=mix",)],
    "algorithm.dynamic_sampling": [
        ("algorithm.name=reinforce", "rollout.group_size=1", "algorithm.dynamic_sampling=true"),
        (*DISTILL, "-rewards", "algorithm.dynamic_sampling=true"),
    ],
    "algorithm.advantage": [(*MIX, "algorithm.advantage={name: gdpo, parts: [r]}")],
    "algorithm.advantage.parts": [
        ("algorithm.advantage=gdpo",),
        ("algorithm.advantage={name: gdpo, parts: []}",),
    ],
    "algorithm.groups.uniform.min_std": [
        ("algorithm.name=reinforce", "rollout.group_size=1", "algorithm.groups.uniform.min_std=0.1")
    ],
    "algorithm.loss.fallback_to_policy_gradient": [
        ("algorithm.loss.fallback_to_policy_gradient=true", "train.update_epochs=2")
    ],
    "algorithm.kl.estimator": [
        (ONLINE_DPO, "algorithm.kl.coef=0.1", "algorithm.kl.estimator=full"),
        ("algorithm.name=dpo", "-rewards", "algorithm.kl={coef: 0.1, estimator: full}"),
    ],
    "algorithm.oversample": [
        ("algorithm.oversample=mean_reward", ASYNC),
        ("algorithm.oversample=mean_reward", "buffer.replay.share=0.5"),
        ("algorithm.oversample=mean_reward", "algorithm.refill=copy"),
    ],
    "train.share_prompts": [
        (
            "algorithm={name: online_dpo, dynamic_sampling: false, loss: {pairs_of: neighbours}}",
            "rollout.group_size=1",
        )
    ],
    "algorithm.groups.truncated": [(ONLINE_DPO, "algorithm.groups.truncated=mask")],
    "algorithm.groups.min_shared_prefix": [
        (f"algorithm.advantage={places}", "algorithm.groups.min_shared_prefix=2")
        for places in ("optimal_token_baseline", "tir_optimal_token_baseline")
    ],
    "algorithm.groups.uniform.by": [(ONLINE_DPO, "algorithm.groups.uniform.by=[exact]")],
    "algorithm.entropy_clip": [("algorithm.loss=geo_mean", "algorithm.entropy_clip=batch")],
    "algorithm.top_entropy_quantile": [("algorithm.loss=kl_cov", "algorithm.top_entropy_quantile=0.2")],
    "algorithm.resample": [(*MIX, "algorithm.resample=pow")],
    "algorithm.refill": [
        (*MIX, "algorithm.refill=copy"),
        (ASYNC, "buffer.replay.queue=true", "algorithm.refill=copy"),
        (ASYNC, "mode=train", "buffer.url=sqlite:///q", "algorithm.refill=copy"),
    ],
    "algorithm.kl.coef": [
        ("algorithm.name=gkd", "reference.path=teacher", "algorithm.kl.coef=0.1"),
        ("algorithm.name=distill", "algorithm.reprompt={}", "algorithm.kl.coef=0.1"),
    ],
    "algorithm.reward_kl.coef": [
        ("algorithm.name=distill", "algorithm.reprompt={}", "algorithm.reward_kl.coef=0.1"),
        (*PRIME, "algorithm.reward_kl.coef=0.1"),
    ],
    "algorithm.mix": [
        (*MIX, "algorithm.loss=gkd", "algorithm.reprompt={}"),
        (*MIX, "algorithm.advantage=prime"),
        (*MIX, "algorithm.name=sft_phi", "algorithm.mix={}", "-rewards"),
    ],
    "reference.path": [
        ("algorithm.name=distill",),
        ("algorithm.name=gkd",),
        (*TEACHERS, "reference.path=teacher"),
    ],
    "reference.models": [
        ("algorithm.name=dpo", "-rewards", *TEACHERS),
        (*TEACHERS, "algorithm.kl.estimator=full"),
        (*MIX, *TEACHERS),
        (*PRIME, *TEACHERS),
    ],
    "reference.mixup_alpha": [
        (LORA, "algorithm.kl.coef=0.1", "reference.reset_interval=1", "reference.mixup_alpha=0.5")
    ],
    "reference.reset_interval": [
        (*DISTILL, "reference.reset_interval=2"),
        (*TEACHERS, "reference.reset_interval=1 epoch"),
        (*PRIME, "reference.reset_interval=2"),
    ],
    "rewards": [("-rewards",)],
    "rollout.env": [
        ("rollout.env={make: 'games.py:Guess'}", "data.chat=false"),
        (*SDPO, "rollout.env={make: 'games.py:Guess'}", "data.chat=true"),
    ],
    "rollout.env.input_tokens": [("rollout.env={make: 'games.py:Guess', input_tokens: 7}", "data.chat=true")],
    "rollout.env.timeout_s": [
        ("rollout.env={make: 'whet.envs.tool_env:tools', timeout_s: 30}",),
        ("rollout.env={make: 'whet.envs.tool_env:tools', arguments: {tool_timeout_s: 61}}",),
    ],
    "rollout.group_size": [
        ("rollout.group_size=1",),
        (ONLINE_DPO, "rollout.group_size=1"),
        (*SDPO, "rollout.group_size=1"),
    ],
    "train.parallel.cp": [(ZERO, "train.parallel.cp=2"), (*SDPO, "train.parallel.cp=2")],
    "rollout.sampling.temperature": [
        ("rollout.sampling.temperature=0.0",),
        ("algorithm.name=remax", "rollout.group_size=1", "rollout.sampling.temperature=0.0"),
    ],
    "buffer.replay.queue": [("buffer.replay.queue=true",)],
    "buffer.replay.capacity": [(ASYNC, "buffer.replay={queue: true, capacity: 3}")],
    "buffer.replay.share": [
        ("buffer.replay.share=0.5", "rollout.max_staleness=1"),
        ("buffer.replay.share=0.5", ASYNC, "mode=train", "buffer.url=sqlite:///q"),
    ],
    "buffer.replay.cooldown": [("buffer.replay={share: 0.5, cooldown: null}",)],
    "buffer.url": [("mode=train",), ("mode=explore",)],
    "cluster.health_timeout_s": [("rollout.replicas=1", "rollout.timeout_s=5", "cluster.health_timeout_s=5")],
    "rollout.server.lora": [("rollout.engine=sglang", LORA, "rollout.server.lora=adapter")],
    "rollout.server.timeout_s": [(VLLM, "rollout.timeout_s=5", "rollout.server.timeout_s=5")],
    "rollout.sampling.stop": [(VLLM, "rollout.sampling.stop=[x]")],
    "eval.sampling.stop": [(VLLM, EVAL, "eval.sampling.stop=[x]")],
    "rollout.server.sleep": [
        (VLLM, "rollout.server.sleep=true", "mode=train", "buffer.url=sqlite:///q"),
        (VLLM, "rollout.server.sleep=true", "rollout.max_staleness=1"),
    ],
    "model.expert_grid": [("model.expert_grid=int4_rtn",)],
    "rollout.server.proxy": [
        ("rollout.engine=openai", "rollout.server.urls=[http://a]", "rollout.server.proxy=http://b"),
        (
            VLLM,
            LORA,
            "rollout.server.urls=[http://a]",
            "rollout.server.proxy=http://b",
            "rollout.server.lora=adapter",
        ),
    ],
    "rollout.server.urls": [
        ("rollout.engine=openai",),
        (
            VLLM,
            "rollout.server.urls=[http://a]",
            "mode=train",
            "cluster.explorers=1",
            "buffer.url=sqlite:///a.db",
        ),
    ],
    "sync.method": [
        ("rollout.replicas=1", "sync.method=files"),
        (ASYNC, "mode=train", "buffer.url=sqlite:///b", "sync.method=collective"),
    ],
    "sync.content": [
        ("rollout.replicas=1", "sync.content=adapters"),
        (LORA, "rollout.replicas=1", "sync.content=adapters", "rollout.quantization=int8"),
    ],
    "sync.dtype": [
        (LORA, "rollout.replicas=1", "sync.content=adapters", "sync.dtype=bfloat16"),
        (PARITY, "rollout.replicas=1", "sync.dtype=bfloat16"),
    ],
    "train.steps": [("train.steps=null",)],
    "train.drop_last": [("train.drop_last=true", "data.train=[{path: a}, {path: b}]")],
    "train.micro_batch_tokens": [("train.micro_batch_tokens=512", "train.micro_batch_rollouts=2")],
    "train.forward_micro_batch_tokens": [
        ("train.forward_micro_batch_tokens=512", "train.forward_micro_batch_rollouts=2")
    ],
    "critic.micro_batch_tokens": [(PPO, "critic.micro_batch_tokens=512", "critic.micro_batch_rollouts=2")],
    "train.tasks_per_step": [("algorithm.name=kto", "train.tasks_per_step=1")],
    "train.shuffle_minibatches": [(*MIX, "train.minibatches=2", "train.shuffle_minibatches=true")],
    "train.router_replay": [
        (*MIX, "train.router_replay=sampled"),
        ("train.router_replay=sampled", "train.compile=true"),
    ],
    "critic.warmup_steps": [(PPO, "critic.warmup_steps=100")],
    "train.optimizer.schedule.warmup_steps": [
        ("train.optimizer.schedule={type: cosine, warmup_steps: 9, total_steps: 9}",),
    ],
    "critic.optimizer.schedule.warmup_steps": [
        (PPO, "critic.optimizer.schedule={type: cosine, warmup_steps: 9, total_steps: 9}"),
    ],
    "train.precision.reduce": [("train.precision={reduce: float32, master_weights: false}",)],
    "train.precision.master_weights": [
        (ZERO, "train.precision.master_weights=false"),
        ("model.dtype=float16", "train.precision.master_weights=false"),
    ],
    "train.precision.compute": [
        (LORA, "train.precision.compute=bfloat16"),
        (PARITY, "train.precision.compute=bfloat16"),
    ],
    "train.precision.float8": [
        (ZERO, "train.precision.float8=tensorwise"),
        (LORA, "train.precision.float8=tensorwise"),
        ("train.compile=true", "train.precision.float8=tensorwise"),
        (PARITY, "train.precision.float8=tensorwise"),
    ],
    "train.compile": [
        (ZERO, "train.compile=true"),
        (PARITY, "train.compile=true"),
        (RANKS, "train.parallel.ep=2", "train.compile=true"),
    ],
    "rollout.quantization": [(PARITY, "rollout.quantization=int8")],
    "machine.logprob_parity": [(PARITY, "rollout.engine=hf"), (PARITY, RANKS)],
    "train.parallel.dp_shard": [("train.parallel.dp_shard=0",)],
    "train.parallel.separate_ranks": [
        ("algorithm.kl={coef: 0.1, estimator: full}", "train.parallel.separate_ranks=[reference]"),
        ("algorithm.kl.coef=0.1", "train.parallel={dp_shard: -1, separate_ranks: [reference]}"),
        ("train.parallel.separate_ranks=[critic]",),
        ("train.parallel.separate_ranks=[reference]",),
    ],
    "train.offload": [
        (ZERO, "train.offload=[reference]"),
        ("train.offload=[policy]",),
        ("train.offload=[critic]",),
        ("train.offload=[reference]",),
        ("algorithm.kl={coef: 0.1, estimator: full}", "train.offload=[reference]"),
    ],
    "profile.tools": [
        ("profile={steps: [1], tools: []}",),
        ("profile={steps: [1], tools: [torch, nsys]}",),
        ("machine.device=cpu", "profile={steps: [1], tools: [memory]}"),
    ],
    "checkpoint.save_contents": [("checkpoint.save_contents=[optimizer]",)],
    "checkpoint.load_contents": [("checkpoint.load_contents=[optimizer]",)],
    "train.parallel.dp_replicate": [(ZERO, "train.parallel.dp_replicate=2")],
    "train.parallel.tp": [(ZERO, "train.parallel.tp=2")],
    "train.parallel.pp": [(ZERO, "train.parallel.pp=2")],
    "train.parallel.ep": [(ZERO, "train.parallel.ep=2")],
    "model.dtype": [(ZERO, "model.dtype=float16")],
    "train.optimizer.name": [(ZERO, "train.optimizer.name=muon")],
    "train.optimizer.state_dtype": [
        (ZERO, "train.optimizer.state_dtype=int8"),
        (ZERO, "train.optimizer.state_dtype=bfloat16"),
    ],
    "critic.optimizer.name": [(ZERO, "critic.optimizer.name=muon")],
    "critic.optimizer.state_dtype": [(ZERO, "critic.optimizer.state_dtype=int8")],
    "checkpoint.sharded": [(ZERO, "checkpoint.sharded=true")],
    "train.engine": [
        ("algorithm.name=sft", "train.engine=simulated"),
        ("train.parallel.dp_shard=2", "train.engine=simulated"),
        (ZERO, "algorithm.kl={coef: 0.1, estimator: full}"),
    ],
    "cluster.ranks": [(ZERO, "cluster.ranks=true")],
    "eval.reward": [(EVAL, "eval.reward={}")],
}
"""Overrides of BASE that break each rule, by the key at which its error stands; `-rewards` leaves that section out."""


def told(overrides: tuple[str, ...]) -> list[tuple[str, str]]:
    without = {one[1:] for one in overrides if one.startswith("-")}
    base = {name: section for name, section in BASE.items() if name not in without}
    return hard_problems(load(None, [one for one in overrides if one[0] != "-"], base).config)


def test_a_config_that_breaks_no_rule_has_no_problem() -> None:
    assert told(()) == []


@pytest.mark.parametrize("rule", REFUSED, ids=lambda rule: f"{rule.keys[0]}: {in_words(rule.when)[:60]}")
def test_every_refusal_is_told_where_it_is_broken(rule: Rule) -> None:
    """Its longest words between values stand in the error of one of its examples at its key."""
    (key,) = rule.keys
    literal = [text for text, *_ in Formatter().parse(rule.message)]
    longest = max(literal, key=len)
    found = [told(broken) for broken in BROKEN[key]]
    assert any(at == key and longest in said for problems in found for at, said in problems), (longest, found)


def test_every_example_breaks_a_rule() -> None:
    keys = {rule.keys[0] for rule in REFUSED}
    assert keys == BROKEN.keys()
    for key in keys:
        assert len(BROKEN[key]) >= sum(rule.keys[0] == key for rule in REFUSED) - 1


def test_a_loss_without_a_ratio_in_several_optimizer_steps_is_noted() -> None:
    (note,) = load(None, ["algorithm.name=rloo", "train.update_epochs=2"], BASE).notes
    assert note.startswith(
        "algorithm.loss: reinforce has no ratio to the policy that sampled, so from the second of"
    )
    assert "of the 2 optimizer steps" in note
    assert not load(None, ["algorithm.name=rloo"], BASE).notes
    assert not load(None, ["algorithm.name=grpo", "train.update_epochs=2"], BASE).notes


def test_rules_look_at_what_there_is() -> None:
    names = {".".join(path[1:]) for path in settings()}
    for rule in RULES:
        for kind, name in subjects(rule.when):
            known = lookup(name.split(".")) if kind == "key" else name in NAMED or name in names
            assert known, (rule.keys, name)


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ({"key": "a", "is": "x"}, "a is x"),
        (no({"key": "a", "is": None}), "a is not null"),
        ({"key": "a", "above": {"key": "b"}}, "a > b"),
        (no({"key": "a", "at_least": 2}), "a < 2"),
        (
            {"all": [{"key": "a"}, {"any": [{"condition": "b"}, no({"condition": "c"})]}]},
            "a and (b or not c)",
        ),
        (no({"key": "a", "given": True}), "a is not given"),
        (no({"any": [{"key": "a"}, {"key": "b"}]}), "not (a or b)"),
        ({"key": "a", "in": [1, True]}, "a is one of 1, true"),
        ({"not": {"key": "a", "in": [1, True]}}, "a is not one of 1, true"),
        ({"key": "a", "holds": ["x"]}, "a contains x"),
        ({"any": []}, "never"),
    ],
)
def test_conditions_in_words(condition: Any, words: str) -> None:
    assert in_words(condition) == words


@pytest.mark.parametrize(
    ("words", "condition"),
    [
        ("train.compile", {"key": "train.compile"}),
        ("not whiten", {"not": {"condition": "whiten"}}),
        ("mode is both", {"key": "mode", "is": "both"}),
        ("model.path is not null", {"not": {"key": "model.path", "is": None}}),
        ("model.path is not given", {"key": "model.path", "given": False}),
        ("not model.path is given", {"not": {"key": "model.path", "given": True}}),
        (
            "critic.warmup_steps >= train.steps",
            {"key": "critic.warmup_steps", "at_least": {"key": "train.steps"}},
        ),
        ("ranks <= 1", {"not": {"condition": "ranks", "above": 1}}),
        ("data.train has more entries than 2", {"key": "data.train", "longer": 2}),
        ("loss is one of KNOWN, gkd", {"condition": "loss", "in": ["ppo", "sft", "gkd"]}),
        ("loss is not one of KNOWN", {"not": {"condition": "loss", "in": ["ppo", "sft"]}}),
        (
            "whiten or judged and (NAMED or mixes)",
            {
                "any": [
                    {"condition": "whiten"},
                    {
                        "all": [
                            {"condition": "judged"},
                            {"any": [{"key": "seed", "is": 1}, {"condition": "mixes"}]},
                        ]
                    },
                ]
            },
        ),
        ("never", {"any": []}),
    ],
)
def test_conditions_are_read_from_words(words: str, condition: Any) -> None:
    assert parsed(words, {"NAMED": {"key": "seed", "is": 1}}, {"KNOWN": ["ppo", "sft"]}) == condition


@pytest.mark.parametrize(
    "words", ["", "seed is 1 2 and", "(whiten", "whiten)", "seed equals 1", "whiten judged", "and whiten"]
)
def test_words_that_are_no_condition_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parsed(words)


def test_what_a_rule_says_can_be_read_again() -> None:
    for rule in RULES:
        words = in_words(rule.when)
        assert in_words(parsed(words)) == words


def test_values_are_compared_with_those_of_other_keys() -> None:
    cfg = Config.model_validate_json('{"train": {"steps": 6}, "critic": {"warmup_steps": 3}}')
    steps, warmup = {"key": "train.steps"}, {"key": "critic.warmup_steps"}
    assert met({"key": "train.steps", "above": warmup}, cfg, {})
    assert not met({"key": "critic.warmup_steps", "at_least": steps}, cfg, {})
    assert met({"key": "train.steps", "multiple_of": warmup}, cfg, {})
    assert not met({"key": "train.steps", "above": {"key": "data.max_total_tokens"}}, cfg, {}), "null"


def test_no_rule_stands_twice() -> None:
    found = Counter((key, in_words(rule.when)) for rule in RULES for key in rule.keys)
    assert [each for each, count in found.items() if count > 1] == []


def test_a_line_of_the_table_is_a_rule_for_each_of_its_names() -> None:
    sizes = [rule for rule in REFUSED if rule.keys[0].endswith("micro_batch_tokens")]
    assert [rule.keys for rule in sizes] == [
        ("train.micro_batch_tokens",),
        ("train.forward_micro_batch_tokens",),
        ("critic.micro_batch_tokens",),
    ]
    assert (
        in_words(sizes[2].when)
        == "critic.micro_batch_tokens is given and critic.micro_batch_rollouts is given"
    )
    assert sizes[2].message == "give critic.micro_batch_tokens or critic.micro_batch_rollouts, not both"
