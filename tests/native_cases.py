"""For every leaf of the native schema: a tiny config that gives it a meaning, and another value of it.

A new field needs a line here; `test_dead_native.py` runs the config with and without the value.
"""

from __future__ import annotations

from typing import Any

from observed import row
from whet.types import Json

ROWS = [row(n) for n in range(8)]

BASE: dict[str, Json] = {
    "model": {
        "scratch": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
            "initializer_range": 0.5,
        }
    },
    "tokenizer": {"build": "chars"},
    "data": {"train": [{"path": "a.jsonl"}], "max_prompt_tokens": 32},
    "rewards": {"r": {"function": "object:r"}},
    "rollout": {"group_size": 2, "sampling": {"max_tokens": 4}},
    "train": {"steps": 1, "tasks_per_step": 2, "optimizer": {"lr": 0.01}},
    "checkpoint": {"export": False},
    "track": {"trackers": ["jsonl"]},
    "machine": {"logprob_parity": "off"},
}

# ---------------------------------------------------------------- contexts

OTHERS = "model={path: A}; tokenizer={}"
REFERENCE = "algorithm.kl.coef=0.1"
TEACHERS = f"{REFERENCE}; {OTHERS}; data.train.0.name=x; reference.models=[{{path: A, values: [x]}}]"
PPO = "algorithm.name=ppo; critic.optimizer.lr=0.01"
GIVEN = "rewards={}; rollout={sampling: {max_tokens: 4}}"
SFT, DPO, KTO = (f"algorithm.name={name}; {GIVEN}" for name in ("sft", "dpo", "kto"))
EVAL = "data.eval=[{path: held.jsonl, name: held}]; data.exclude_eval=false"
MIX = "algorithm.name=mix; algorithm.mix.demonstration_ratio=0.5; data.demonstrations=[{path: a.jsonl}]"
GDPO = (
    "rewards={f: {function: format, arguments: {pattern: '.*[0-4].*'}}, "
    "g: {function: format, arguments: {pattern: '.*[a-k].*'}}}; rollout.group_size=8; "
    "algorithm.advantage={name: gdpo, parts: [f, g]}"
)
MOVED = "train.update_epochs=3; train.optimizer.lr=0.05; rollout.group_size=4"
"""Ratios move away from 1 within a step."""
PRIME = "algorithm.name=prime; critic.optimizer.lr=0.05; rollout.group_size=4; train.steps=2"
REC = f"algorithm.name=rec; {MOVED}"
SCHEDULE = "train.steps=4"
LONG = "data.max_prompt_tokens=3; data.overlong=truncate_right"
MOE = "model.scratch.name=qwen3_moe; model.scratch.num_experts=4"
TURN = "{{ m.content }}{{ mark }}{{ eos_token if m.role == 'assistant' }}"
CHAT = f'data.chat=true; tokenizer.chat_template="{{% for m in messages %}}{TURN}{{% endfor %}}"'
TOLD = f"{CHAT[:-1]}{{% if tools %}}{{{{ tools[0].function.name }}}}{{% endif %}}{CHAT[-1]}"
REWRITES = (
    "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
)
ENV = (
    "data.chat=true; rollout.sampling.max_tokens=8; rollout.env={make: 'rows.py:Game', observation_tokens: 16}; "
    "train.steps=1"
)
SECOND = "rewards.s={function: 'object:s', arguments: {salt: x}}"
HALF = "rewards.r.function='rows.py:half'; reward_workers.max_failure_rate=1.0"
JUDGED = "rewards={r: {model: {path: JUDGE_C}}}"
"""Its tokens are words, the policy's characters."""
GYM = "function: reasoning_gym, arguments: {task: spell_backward, size: 6}"
ROOM = "data.max_prompt_tokens=300; model.scratch.max_position_embeddings=512"
REMOTE = "track.trackers=[wandb]"
REPLAY = "buffer.replay.share=0.5; train.steps=6"
ADAPTIVE = "data.order.name=adaptive; data.order.temperature=0; train.steps=6"
BY_MODELS = f"{ADAPTIVE}; data.order.columns=[rate, rate2]; data.order.prior_weight=0.3"
FREE = "rollout.max_staleness=4; rollout.schedule=async; train.steps=4"
CONTROLLED = "linear_decay_use_count_control_randomization"
SDPO = (
    "algorithm.name=sdpo; algorithm.reprompt.success_reward=0.3; rollout.group_size=4; "
    "model.scratch.max_position_embeddings=512"
)
THINKS = (
    f"{SDPO}; data.chat=true; data.train.0.reply_prefix='<think>t</think>'; tokenizer.chat_template="
    "\"{% for m in messages %}{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
    "{{ '' if m.role == 'assistant' else '#' }}{% endfor %}\""
)
BEST = (
    f"{EVAL}; eval.interval=1; eval.samples=4; eval.sampling.temperature=1.0; train.steps=4; train.optimizer.lr=0.05; "
    "checkpoint.keep=1; checkpoint.keep_best.metric=eval/held/reward_mean"
)
EARLY = (
    f"{EVAL}; eval.interval=1; eval.samples=4; eval.sampling.temperature=1.0; train.steps=4; train.optimizer.lr=0.05; "
    "train.early_stopping.metric=eval/held/reward_mean; train.early_stopping.patience=1"
)

Case = tuple[str, Any]
"""(overrides that give the key a meaning, its other value). In values A and B are folders of two models."""


def optimizer(at: str, context: str) -> dict[str, Case]:
    """Keys of an optimizer and its schedule."""
    s = f"{at}.schedule"
    cosine = f"{context}; {SCHEDULE}; {s}.type=cosine"
    wsd = f"{context}; {SCHEDULE}; {s}.type=wsd; {s}.decay_steps=3"
    return {
        f"{at}.name": (context, "sgd"),
        f"{at}.momentum": (f"{context}; {at}.name=sgd", 0.9),
        f"{at}.state_dtype": (context, "int8"),
        f"{at}.implementation": (f"{context}; {SCHEDULE}", "for-loop"),
        f"{at}.param_groups.*.lr_factor": (f"{context}; {at}.param_groups={{norm: {{lr_factor: 0.5}}}}", 0.1),
        f"{at}.param_groups.*.weight_decay": (
            f"{context}; {at}.param_groups={{norm: {{lr_factor: 0.5}}}}",
            0.5,
        ),
        f"{at}.lr": (context, 0.02),
        f"{at}.betas": (context, [0.5, 0.5]),
        f"{at}.eps": (context, 0.1),
        f"{at}.weight_decay": (context, 0.5),
        f"{at}.decay_all": (f"{context}; {at}.weight_decay=0.5", True),
        f"{at}.max_grad_norm": (f"{context}; {at}.eps=0.1", 1e-4),
        f"{s}.type": (f"{context}; {SCHEDULE}", "linear"),
        f"{s}.unit": (f"{cosine}; train.update_epochs=2", "train_step"),
        f"{s}.warmup_steps": (f"{context}; {SCHEDULE}", 2),
        f"{s}.warmup_start_ratio": (f"{context}; {s}.warmup_steps=2", 0.5),
        f"{s}.warmup_ends": (f"{context}; {s}.warmup_steps=2", "peak"),
        f"{s}.min_lr_ratio": (cosine, 0.5),
        f"{s}.total_steps": (cosine, 2),
        f"{s}.num_cycles": (cosine, 1.5),
        f"{s}.decay_steps": (wsd, 2),
        f"{s}.decay_type": (wsd, "minus_sqrt"),
        f"{s}.weight_decay_end": (f"{context}; {at}.weight_decay=0.5", 0.1),
        f"{s}.weight_decay_type": (f"{context}; {SCHEDULE}; {s}.weight_decay_end=0.9", "cosine"),
    }


def lora(at: str, context: str) -> dict[str, Case]:
    """Keys of adapters."""
    on = f"{context}; {at}.rank=2"
    return {
        f"{at}.rank": (on, 4),
        f"{at}.alpha": (on, 4.0),
        f"{at}.rslora": (on, True),
        f"{at}.dropout": (on, 0.5),
        f"{at}.targets": (on, ["q_proj"]),
        f"{at}.fused": (on, True),
        f"{at}.experts": (f"{on}; {MOE}; {at}.targets=[down_proj]", "shared"),
        f"{at}.exclude_modules": (on, ["q_proj"]),
        f"{at}.modules_to_save": (on, ["norm"]),
        f"{at}.init": (on, "gaussian"),
        f"{at}.rank_pattern": (on, {"q_proj": 1}),
        f"{at}.alpha_pattern": (on, {"q_proj": 1.0}),
        f"{at}.path": (on, "ADAPTER"),
    }


def sampling(at: str, context: str) -> dict[str, Case]:
    """Keys of sampling. The model's tokens are drawn from about twenty characters."""
    return {
        f"{at}.temperature": (context, 0.5),
        f"{at}.top_k": (context, 2),
        f"{at}.top_p": (context, 0.3),
        f"{at}.min_p": (context, 0.5),
        f"{at}.repetition_penalty": (context, 5.0),
        f"{at}.max_tokens": (context, 3),
        f"{at}.min_tokens": (f"{context}; {at}.max_tokens=24", 24),
        f"{at}.stop": (context, ["1", "2", "3", "+", "-", "="]),
        f"{at}.stop_token_ids": (context, list(range(3, 12))),
        f"{at}.ignore_eos": (f"{context}; {at}.max_tokens=24", True),
    }


def source(part: str, context: str, other: str = "") -> dict[str, Case]:
    """Keys of a source. other: overrides under which the columns of replies are read."""
    at, first = f"data.{part}.*", f"data.{part}.0"
    answers = ", response: answer" if part == "demonstrations" else ""
    gym = f"{context}; {ROOM}; data.{part}=[{{{GYM}{answers}}}]; rollout.sampling.max_tokens={40 if answers else 4}"
    order = "data.order=easy_first; data.train.0.difficulty=hard"
    two = f"{context}; data.{part}=[{{path: a.jsonl}}, {{path: b.jsonl}}]"
    function = f"{context}; data.{part}=[{{function: 'rows.py:made'}}]"
    labelled = f"{KTO}; {other}"
    return {
        f"{at}.name": (context, "another"),
        f"{at}.path": (f"{context}; data.{part}=[{{path: a.jsonl}}]", "b.jsonl"),
        f"{at}.subset": (f"{context}; data.{part}=[{{path: set, subset: one, split: train}}]", "two"),
        f"{at}.split": (f"{context}; data.{part}=[{{path: set, subset: one, split: train}}]", "test"),
        f"{at}.function": (function, "rows.py:others"),
        f"{at}.arguments": (gym, {"task": "letter_counting", "size": 6}),
        f"{at}.rows": (f"{context}; data.{part}=[{{rows: ROWS}}]", ROWS[2:7]),
        f"{at}.weight": (two, 9.0),
        f"{at}.prompt": (context, "prompt2"),
        f"{at}.messages": (
            f"{SFT}; {context}; {CHAT}" if part != "demonstrations" else f"{context}; {CHAT}",
            "talk",
        ),
        f"{at}.answer": (context, "answer2"),
        f"{at}.response": (f"{SFT}; {other}" if part != "demonstrations" else context, "response2"),
        f"{at}.rejected": (f"{DPO}; {other}", "rejected2"),
        f"{at}.tools": (f"{context}; {TOLD}", "tools2"),
        f"{at}.chat_template_kwargs": (f"{context}; {CHAT}", "mark"),
        f"{at}.desirable": (labelled, "desirable2"),
        f"{at}.label": (context, "kind"),
        f"{at}.difficulty": (f"{context}; {order}; {first}.difficulty=hard", "hard2"),
        f"{at}.template": (context, "0{prompt}"),
        f"{at}.system_prompt": (f"{context}; {CHAT}", "1+1"),
        f"{at}.system_prompt_column": (f"{context}; {CHAT}; {first}.system_prompt='2'", "answer"),
        f"{at}.reply_prefix": (context, "1"),
        f"{at}.rewards": (
            f"{context}; rewards.s={{function: 'object:s', arguments: {{salt: x}}}}; {first}.name=n",
            ["s"],
        ),
        f"{at}.skip": (context, 3),
        f"{at}.limit": (context, 3),
    }


CASES: dict[str, Case] = {
    "name": ("", "another"),
    "seed": ("", 1),
    "run_dir": ("", "elsewhere"),
    "imports": ("", ["mine.py"]),
    "model.path": (OTHERS, "B"),
    "model.scratch": ("", {"name": "llama", "hidden_size": 16, "num_attention_heads": 2}),
    "model.scratch.hidden_size": ("", 32),
    "model.scratch.num_hidden_layers": ("", 2),
    "model.scratch.num_attention_heads": ("", 1),
    "model.scratch.num_key_value_heads": ("", 1),
    "model.scratch.head_dim": ("", 4),
    "model.scratch.intermediate_size": ("", 24),
    "model.scratch.max_position_embeddings": ("checkpoint.export=true", 72),
    "model.scratch.rope_theta": ("", 50.0),
    "model.scratch.tie_word_embeddings": ("", False),
    "model.scratch.initializer_range": ("", 0.2),
    "model.scratch.num_experts": (MOE, 3),
    "model.scratch.num_experts_per_tok": (MOE, 1),
    "model.scratch.sliding_window": ("model.scratch.name=mistral", 2),
    "model.dtype": ("", "bfloat16"),
    "model.overrides": ("", {"rms_norm_eps": 0.1}),
    "model.mtp": ("", "cross_entropy"),
    "model.mtp.layers": ("model.mtp=cross_entropy", 2),
    "model.mtp.coef": ("model.mtp=distill", 0.5),
    "model.mtp.detach": ("model.mtp=cross_entropy", "model"),
    "model.mtp.top_k": ("model.mtp=distill", 2),
    "model.expert_grid": (f"{MOE}; model.lora.rank=2", "int4_rtn"),
    **lora("model.lora", ""),
    "tokenizer.path": ("tokenizer={path: A}", "C"),
    "tokenizer.build": ("", "words"),
    "tokenizer.vocab_size": ("tokenizer.build=words", 8),
    "tokenizer.chat_template": (CHAT, "{% for m in messages %}1{{ m.content }}{% endfor %}"),
    "tokenizer.chat_template_kwargs": (CHAT, {"mark": "+"}),
    "tokenizer.date": (
        CHAT.replace("{{ mark", "{% if strftime_now('%Y') == '2019' %}a{% endif %}{{ mark"),
        "2019-01-30",
    ),
    "critic.path": (PPO, "A"),
    **lora("critic.lora", PPO),
    "critic.warmup_steps": (PPO, 1),
    "critic.minibatches": (PPO, 2),
    "critic.update_epochs": (PPO, 2),
    "critic.micro_batch_tokens": (PPO, 20),
    "critic.micro_batch_rollouts": (PPO, 1),
    "critic.gradient_checkpointing": (PPO, True),
    "critic.overrides": (f"{PPO}; critic.path=A", {"rms_norm_eps": 0.1}),
    "critic.value_clip": (f"{PPO}; train.update_epochs=3", 1e-5),
    "critic.loss_agg_mode": (PPO, "token-sum"),
    "critic.normalize_decay": (PPO, 0.5),
    **optimizer("critic.optimizer", PPO),
    "reference.path": (f"{REFERENCE}; {OTHERS}", "B"),
    "reference.overrides": (
        f"{REFERENCE}; {OTHERS}; reference.path=B",
        {"rms_norm_eps": 0.1},
    ),
    "reference.models.*.path": (TEACHERS, "B"),
    "reference.reset_interval": (f"{REFERENCE}; data.train.0.limit=2", "1 epoch"),
    "reference.mixup_alpha": (f"{REFERENCE}; reference.reset_interval=1; train.steps=4", 0.5),
    "reference.reset_optimizer": (f"{REFERENCE}; reference.reset_interval=1", True),
    **source("train", ""),
    **source("eval", EVAL, f"{EVAL}"),
    **source("demonstrations", MIX),
    "data.exclude_eval": ("data.eval=[{path: held.jsonl}]", False),
    "data.order": ("", "sequential"),
    "data.order.distinct": ("data.order=random; train.steps=4", 8),
    "data.order.target": (ADAPTIVE, 1.0),
    "data.order.temperature": (ADAPTIVE, 5.0),
    "data.order.thompson": (ADAPTIVE, True),
    "data.order.decay": (ADAPTIVE, 1.0),
    "data.order.evidence": (f"{ADAPTIVE}; data.order.decay=0.5", 100),
    "data.order.reward_min": (ADAPTIVE, -5.0),
    "data.order.reward_max": (ADAPTIVE, 0.1),
    "data.order.columns": (ADAPTIVE, ["rate", "rate2"]),
    "data.order.prior_weight": (BY_MODELS, 1.0),
    "data.order.prior_adapts": (BY_MODELS, True),
    "data.mixing": ("data.train=[{path: a.jsonl}, {path: b.jsonl}]", "proportional"),
    "data.seed": ("", 5),
    "data.max_prompt_tokens": (LONG, 4),
    "data.max_total_tokens": (f"{SFT}; data.overlong=truncate_right", 5),
    "data.overlong": (LONG, "truncate_left"),
    "data.learn_turns": (f"{SFT}; {CHAT}; data.train=[{{path: a.jsonl, messages: talk}}]", "last"),
    "data.chat": (CHAT.replace("data.chat=true", "data.chat=false"), True),
    "algorithm.name": ("", "rloo"),
    "algorithm.advantage": ("", "rloo"),
    "algorithm.loss": ("", "reinforce"),
    "algorithm.loss_agg_mode": ("", "token-sum"),
    "algorithm.mean_over_rollouts": ("algorithm.loss_agg_mode=token-mean", 3),
    "algorithm.norm_tokens": ("algorithm.loss_agg_mode=token-sum-norm", 3),
    "algorithm.whiten": ("", True),
    "algorithm.entropy_coef": ("", 0.1),
    "algorithm.entropy_control": ("algorithm.entropy_coef=0.1", {"target": 9.0}),
    "algorithm.entropy_control.target": (
        "algorithm.entropy_coef=0.1; algorithm.entropy_control={target: 9.0}",
        1e-9,
    ),
    "algorithm.entropy_control.delta": (
        "algorithm.entropy_coef=0.1; algorithm.entropy_control={target: 9.0}",
        0.05,
    ),
    "algorithm.entropy_control.min": ("algorithm.entropy_control={target: 9.0}", 0.1),
    "algorithm.entropy_control.max": (
        "algorithm.entropy_coef=0.1; algorithm.entropy_control={target: 9.0}",
        0.01,
    ),
    "algorithm.kl.coef": ("", 0.1),
    "algorithm.kl.estimator": (REFERENCE, "k2"),
    "algorithm.reward_kl.coef": ("", 0.1),
    "algorithm.reward_kl.estimator": ("algorithm.reward_kl.coef=0.1", "k2"),
    "algorithm.reward_kl.target": ("algorithm.reward_kl.coef=0.1", 0.5),
    "algorithm.reward_kl.horizon": ("algorithm.reward_kl={coef: 0.1, target: 0.5}", 5),
    "algorithm.correction.weight": ("rollout.sync_interval=2", "token"),
    "algorithm.correction.weight.low": ("rollout.sync_interval=2; algorithm.correction.weight=token", 0.999),
    "algorithm.correction.weight.high": ("rollout.sync_interval=2; algorithm.correction.weight=token", 1.001),
    "algorithm.correction.weight.outside": (
        "rollout.sync_interval=2; algorithm.correction.weight={name: token, low: 0.999, high: 1.001}",
        "mask",
    ),
    "algorithm.correction.weight.normalize": (
        "rollout.sync_interval=2; algorithm.correction.weight=token",
        True,
    ),
    "algorithm.correction.staleness_decay": ("rollout.sync_interval=2", 0.5),
    "algorithm.correction.second_moment": ("rollout.sync_interval=2", 1e-9),
    "algorithm.correction.denominator": (
        "rollout.sync_interval=2; algorithm.correction.weight={name: token, high: 1.0, outside: mask}",
        "all",
    ),
    "algorithm.correction.reject.*.statistic": ("CORRECT={over: mean, high: 0.999}", "k2"),
    "algorithm.correction.reject.*.over": ("CORRECT={over: token, high: 1.0}", "max"),
    "algorithm.correction.reject.*.low": ("CORRECT={high: 2.0}", 0.999),
    "algorithm.correction.reject.*.high": ("CORRECT={low: 0.1}", 0.999),
    "algorithm.correction.reject_policy": (f"CORRECT={{high: 1.001}}; {MOVED}", "current"),
    "algorithm.old_logprobs": ("train.temperature=0.7", "sampled"),
    "algorithm.dynamic_sampling": (
        "rewards={f: {function: format, arguments: {pattern: '[0-9]'}}}; rollout.group_size=3",
        True,
    ),
    "algorithm.refill": (
        "rewards={f: {function: format, arguments: {pattern: '[0-9]'}}}; rollout.group_size=3; "
        "algorithm.dynamic_sampling=true; train.tasks_per_step=4",
        "copy",
    ),
    "algorithm.advantage.std_floor": ("", 0.9),
    "algorithm.advantage.std_epsilon": ("", 0.5),
    "algorithm.advantage.std_scope": ("", "batch"),
    "algorithm.advantage.rank_penalty": ("rollout.group_size=4", 0.5),
    "algorithm.advantage.parts": (GDPO, ["f"]),
    "algorithm.advantage.part_weights": (GDPO, [1.0, -3.0]),
    "algorithm.advantage.single_rollout": (
        "algorithm.name=rloo; rewards.r.function='rows.py:half'; reward_workers.max_failure_rate=1.0; "
        "train.tasks_per_step=4",
        "raw",
    ),
    "algorithm.advantage.opmd_baseline": ("algorithm.name=opmd", "logavgexp"),
    "algorithm.advantage.tau": ("algorithm.name=opmd; algorithm.advantage.opmd_baseline=logavgexp", 0.5),
    "algorithm.advantage.softmean_eta": ("algorithm.advantage=softmean", 9.0),
    "algorithm.advantage.process_coef": (PRIME, 0.0),
    "algorithm.advantage.outcome_coef": (PRIME, 0.0),
    "algorithm.advantage.implicit_beta": (f"{PRIME}; algorithm.advantage.implicit_normalize=false", 0.5),
    "algorithm.advantage.implicit_granularity": (PRIME, "whole"),
    "algorithm.advantage.implicit_normalize": (PRIME, False),
    "algorithm.advantage.implicit_loss": (PRIME, "dpo"),
    "algorithm.advantage.implicit_update": (PRIME, "after"),
    "algorithm.oversample": ("", {"factor": 3.0, "low": 0.3}),
    "algorithm.oversample.factor": ("algorithm.oversample={low: 0.3}", 2.0),
    "algorithm.oversample.low": ("algorithm.oversample={finished: false, factor: 8.0}", 0.6),
    "algorithm.oversample.high": ("algorithm.oversample={low: null, finished: false, factor: 8.0}", 0.4),
    "algorithm.oversample.finished": ("algorithm.oversample={low: null, high: null}", False),
    "algorithm.advantage.baseline_shift": ("algorithm.name=asymre", 0.2),
    "algorithm.advantage.turn_weight": ("algorithm.name=gigpo", 0.3),
    "algorithm.advantage.distill_discount": (f"algorithm.name=distill; {OTHERS}; reference.path=B", 0.5),
    "algorithm.advantage.distill_mixture": (
        f"algorithm.name=distill; {OTHERS}; reference.path=B; algorithm.advantage.distill_estimator=jsd",
        0.25,
    ),
    "algorithm.advantage.distill_coef": (f"algorithm.name=distill; {OTHERS}; reference.path=B", 0.5),
    "algorithm.advantage.distill_estimator": (f"algorithm.name=distill; {OTHERS}; reference.path=B", "abs"),
    "algorithm.loss.divergence": (f"algorithm.name=gkd; {OTHERS}; reference.path=B", "full"),
    "algorithm.loss.top_k": (
        f"algorithm.name=gkd; {OTHERS}; reference.path=B; algorithm.loss.divergence=forward_topk",
        2,
    ),
    "algorithm.loss.min_logprob": (
        f"algorithm.name=gkd; {OTHERS}; reference.path=B; "
        "algorithm.loss={divergence: forward_topk, top_k: 4}",
        -0.5,
    ),
    "algorithm.loss.distill_coef": (
        f"algorithm.name=gkd; {OTHERS}; reference.path=B; algorithm.entropy_coef=0.1",
        0.5,
    ),
    "algorithm.loss.jsd_beta": (
        f"algorithm.name=gkd; {OTHERS}; reference.path=B; algorithm.loss.divergence=jsd",
        0.1,
    ),
    "algorithm.loss.top_k_of": (
        f"algorithm.name=gkd; {OTHERS}; reference.path=B; algorithm.loss={{divergence: jsd_topk, top_k: 2}}",
        "policy",
    ),
    "algorithm.loss.top_k_rest": (
        f"algorithm.name=gkd; {OTHERS}; reference.path=B; algorithm.loss={{divergence: jsd_topk, top_k: 2}}",
        "renormalize",
    ),
    "algorithm.loss.max_divergence": (f"algorithm.name=gkd; {OTHERS}; reference.path=B", 1e-3),
    "algorithm.advantage.handle_zero_tail": (
        "algorithm.name=optimal_token_baseline; rollout.sampling.max_tokens=16",
        False,
    ),
    "algorithm.advantage.gpg_alpha": (
        "algorithm.name=gpg; rollout.group_size=4; "
        "rewards={f: {function: format, arguments: {pattern: '.*[0-4].*'}}}",
        "nonzero",
    ),
    "algorithm.advantage.gamma": (PPO, 0.5),
    "algorithm.advantage.lam": (PPO, 0.5),
    "algorithm.advantage.bootstrap_truncated": (PPO, True),
    "algorithm.advantage.normalize_std": ("", False),
    "algorithm.advantage.std_ddof": ("", 0),
    "algorithm.advantage_clip": ("", [-0.1, None]),
    "algorithm.resample": ("", "pow"),
    "algorithm.resample.power": ("algorithm.resample=pow; rollout.group_size=4", 9.0),
    "algorithm.groups.truncated": ("", "zero"),
    "algorithm.groups.min_reward": ("rollout.group_size=4", 0.2),
    "algorithm.groups.keep_best": ("rollout.group_size=4", 2),
    "algorithm.groups.keep_worst": ("rollout.group_size=4", 2),
    "algorithm.groups.min_shared_prefix": (
        "rollout.group_size=8; rollout.sampling={top_k: 2, max_tokens: 8}",
        1,
    ),
    "algorithm.groups.uniform": ("", {"min_std": 0.3}),
    "algorithm.groups.uniform.min_std": ("", 0.3),
    "algorithm.groups.uniform.ddof": ("algorithm.groups.uniform.min_std=0.15; rollout.group_size=2", 0),
    "algorithm.groups.uniform.by": (
        "algorithm.dynamic_sampling=true; rewards.f={function: format, arguments: {pattern: '[0-9]'}}; "
        "rollout.group_size=3",
        ["f"],
    ),
    "algorithm.groups.uniform.above": (
        "algorithm.dynamic_sampling=true; rewards.f={function: format, arguments: {pattern: '[0-9]'}}; "
        "rollout.group_size=3",
        0.5,
    ),
    "algorithm.loss.clip_low": (MOVED, 0.01),
    "algorithm.loss.clip_high": (MOVED, 0.01),
    "algorithm.loss.dual_clip": (f"{MOVED}; train.optimizer.lr=0.3", 1.01),
    "algorithm.loss.sequence_mask_delta": (MOVED, 0.001),
    "algorithm.loss.fallback_to_policy_gradient": (
        "rollout.sync_interval=2; algorithm.old_logprobs=sampled",
        True,
    ),
    "algorithm.loss.gspo_form": (
        f"algorithm.name=gspo; algorithm.advantage=gae; algorithm.advantage.lam=0.5; {MOVED}",
        "token",
    ),
    "algorithm.loss.sequence_mask_anchor": (
        f"algorithm.loss.sequence_mask_delta=0.001; train.temperature=0.7; {MOVED}",
        "sampled",
    ),
    "algorithm.loss.mask_low": (
        f"algorithm.name=cispo; {MOVED}; algorithm.loss={{clip_low: 0.5, clip_high: 0.5, cispo_mask: true}}",
        0.01,
    ),
    "algorithm.loss.mask_high": (
        f"algorithm.name=cispo; {MOVED}; algorithm.loss={{clip_low: 0.5, clip_high: 0.5, cispo_mask: true}}",
        0.01,
    ),
    "algorithm.loss.cispo_mask": (f"algorithm.name=cispo; {MOVED}; algorithm.loss.clip_high=0.01", True),
    "algorithm.loss.tau_pos": (f"algorithm.name=sapo; {MOVED}", 2.0),
    "algorithm.loss.tau_neg": (f"algorithm.name=sapo; {MOVED}", 2.0),
    "algorithm.loss.sapo_detach": (f"algorithm.name=sapo; {MOVED}", True),
    "algorithm.loss.clip_cov_ratio": (
        f"algorithm.name=clip_cov; {MOVED}; algorithm.loss.clip_cov_lb=-5.0",
        0.9,
    ),
    "algorithm.loss.clip_cov_lb": (
        f"algorithm.name=clip_cov; {MOVED}; algorithm.loss.clip_cov_ratio=0.9",
        -5.0,
    ),
    "algorithm.loss.clip_cov_ub": (
        f"algorithm.name=clip_cov; {MOVED}; algorithm.loss.clip_cov_ratio=0.9; algorithm.loss.clip_cov_lb=-5.0",
        0.0,
    ),
    "algorithm.loss.kl_cov_ratio": (f"algorithm.name=kl_cov; {MOVED}", 0.9),
    "algorithm.loss.ppo_kl_coef": (f"algorithm.name=kl_cov; {MOVED}; algorithm.loss.kl_cov_ratio=0.5", 0.1),
    "algorithm.loss.dppo_divergence": (
        f"algorithm.name=dppo; {MOVED}; algorithm.loss.dppo_delta_low=0.05",
        "binary_kl",
    ),
    "algorithm.loss.dppo_delta_low": (f"algorithm.name=dppo; {MOVED}", 0.001),
    "algorithm.loss.dppo_anchor": (f"algorithm.name=dppo; train.temperature=0.7; {MOVED}", "old"),
    "algorithm.loss.dppo_max_ratio": (f"algorithm.name=dppo; {MOVED}", 0.9),
    "algorithm.loss.dppo_delta_high": (f"algorithm.name=dppo; {MOVED}", 0.001),
    "algorithm.loss.aipo_rho": (f"algorithm.name=aipo; {MOVED}", 1.001),
    "algorithm.loss.eta": (f"algorithm.name=self_play; {MOVED}", 0.1),
    "algorithm.loss.pairs_of": ("algorithm.name=online_dpo; rollout.group_size=4", "neighbours"),
    "algorithm.loss.ratio_epsilon": (f"algorithm.name=softmax_ppo; {MOVED}", 0.001),
    "algorithm.loss.m2_threshold": (f"algorithm.name=m2po; {MOVED}", 0.0),
    **{
        f"algorithm.loss.vespo_{name}": (f"algorithm.name=vespo; {MOVED}", 9.0)
        for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
    },
    "algorithm.loss.dro_beta": (f"algorithm.name=dro; {MOVED}", 0.9),
    "algorithm.loss.weight_over": (f"algorithm.loss=reinforce_is; {MOVED}", "sequence"),
    "algorithm.loss.weight_low": (f"algorithm.loss=reinforce_is; {MOVED}", 0.999),
    "algorithm.loss.weight_high": (f"algorithm.loss=reinforce_is; {MOVED}", 1.001),
    "algorithm.loss.weight_outside": (
        f"algorithm.loss=reinforce_is; {MOVED}; algorithm.loss.weight_high=1.001",
        "mask",
    ),
    "algorithm.loss.weight_normalize": (f"algorithm.loss=reinforce_is; {MOVED}", True),
    "algorithm.top_entropy_quantile": ("", 0.5),
    "algorithm.entropy_clip": (
        "rollout.group_size=16; rollout.sampling.max_tokens=16; algorithm.whiten=true",
        "batch",
    ),
    "algorithm.entropy_clip.mu": ("rollout.group_size=4; algorithm.entropy_clip=batch", 0.1),
    "algorithm.entropy_clip.max_frac": (
        "rollout.group_size=4; algorithm.entropy_clip={name: vocabulary, mu: 0.1}",
        0.01,
    ),
    "algorithm.loss.tau": ("algorithm.name=opmd", 0.5),
    "algorithm.loss.topr_threshold": (f"algorithm.name=topr; {MOVED}", 0.9),
    "algorithm.loss.rec_clip_mode": (
        f"algorithm.name=rec; {MOVED}; algorithm.loss.clip_low=0.01; algorithm.loss.clip_high=0.01",
        "two-side",
    ),
    "algorithm.loss.rec_ring_low": (
        f"algorithm.name=rec; {MOVED}; algorithm.loss.rec_clip_mode=ring; algorithm.loss.clip_low=0.001",
        0.01,
    ),
    "algorithm.loss.rec_ring_high": (
        f"algorithm.name=rec; {MOVED}; algorithm.loss.rec_clip_mode=ring; algorithm.loss.clip_high=0.001",
        0.01,
    ),
    "algorithm.loss.rec_weight": (f"algorithm.name=rec; {MOVED}", "importance_sampling"),
    "algorithm.loss.rec_temperature": (
        f"algorithm.name=rec; {MOVED}; algorithm.loss.rec_weight=advantage",
        0.3,
    ),
    "algorithm.loss.rec_regularizer": (
        f"{REC}; algorithm.loss.rec_regularizer=forward-kl; algorithm.loss.rec_regularizer_coef=0.5",
        "k2",
    ),
    "algorithm.loss.rec_regularizer_coef": (
        f"algorithm.name=rec; {MOVED}; algorithm.loss.rec_regularizer=k2; algorithm.loss.rec_regularizer_coef=0.25",
        0.5,
    ),
    "algorithm.positive_nll_coef": ("", 0.3),
    "algorithm.entropy_agg_mode": ("algorithm.entropy_coef=0.1", "token-mean"),
    "algorithm.reprompt.success_reward": (SDPO, 0.5),
    "algorithm.reprompt.own_success": (SDPO, True),
    "algorithm.reprompt.thoughts": (THINKS, False),
    "algorithm.reprompt.feedback": (SDPO, "says"),
    "algorithm.reprompt.template": (SDPO, "{solution}{prompt}"),
    "algorithm.reprompt.solution_template": (SDPO, "{reply}"),
    "algorithm.reprompt.feedback_template": (f"{SDPO}; algorithm.reprompt.feedback=says", "!{feedback}"),
    "algorithm.reprompt.max_prompt_tokens": (SDPO, 1),
    "algorithm.mix.demonstration_ratio": (f"{MIX}; train.tasks_per_step=4", 0.25),
    "algorithm.mix.loss": (MIX, "sft_is"),
    "algorithm.mix.loss.phi_cutoff": (f"{MIX}; algorithm.mix.loss=sft_phi", 0.01),
    "algorithm.mix.mu": (MIX, 0.5),
    "algorithm.mix.mu_schedule": (MIX, {"warmup_steps": 3}),
    "algorithm.mix.mu_schedule.warmup_steps": (MIX, 3),
    "algorithm.mix.mu_schedule.valley": (MIX, 0.01),
    "algorithm.mix.mu_schedule.decay_steps": (f"{MIX}; algorithm.mix.mu_schedule.valley=0.01", 3),
    "algorithm.loss.phi_cutoff": (f"algorithm.name=sft_phi; {GIVEN}", 0.01),
    "algorithm.loss.beta": (DPO, 0.5),
    "algorithm.loss.pair_loss": (DPO, "hinge"),
    "algorithm.loss.pair_weights": (f"{DPO}; algorithm.loss.pair_loss=[sigmoid, sft]", [0.5, 2.0]),
    "algorithm.loss.ipo_mean": (f"{DPO}; algorithm.loss.pair_loss=ipo", False),
    "algorithm.loss.nll_weight": (f"algorithm.name=cpo; {GIVEN}", 0.2),
    "algorithm.loss.reward_alpha": (f"algorithm.name=simpo; {GIVEN}", 0.5),
    "algorithm.loss.label_smoothing": (DPO, 0.2),
    "algorithm.loss.target_margin": (f"algorithm.name=simpo; {GIVEN}", 0.2),
    "algorithm.loss.odds_weight": (f"algorithm.name=orpo; {GIVEN}", 0.9),
    "algorithm.loss.desirable_weight": (KTO, 0.3),
    "algorithm.loss.undesirable_weight": (KTO, 0.3),
    "rewards.*.function": ("rewards={r: {function: exact}}", "number"),
    "rewards.*.weight": (SECOND, 0.3),
    "rewards.*.arguments": ("", {"salt": "y"}),
    "rewards.*.model.path": (JUDGED, "JUDGE_A"),
    "rewards.*.model.input": (JUDGED, "tokens"),
    "rewards.*.model.tokenizer": (JUDGED, "A"),
    "rewards.*.model.chat_template": (
        f"{CHAT}; {JUDGED}",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    ),
    "rewards.*.model.max_tokens": (f"{JUDGED}; rewards.r.model.overlong=truncate_left", 3),
    "rewards.*.model.overlong": (
        f"{JUDGED}; rewards.r.model.max_tokens=3; rewards.r.model.overlong=truncate_left",
        "truncate_right",
    ),
    "rewards.*.model.dtype": (JUDGED, "bfloat16"),
    "rollout.engine": ("", "hf"),
    "rollout.env.make": (ENV, "rows.py:Stubborn"),
    "rollout.env.arguments": (ENV, {"bonus": 1.0}),
    "rollout.env.max_turns": (ENV, 1),
    "rollout.env.max_cost": (ENV.replace("Game", "Paid"), 1.0),
    "rollout.env.observation_tokens": (ENV, 2),
    "rollout.env.max_tokens_per": (ENV.replace("max_tokens=8", "max_tokens=2"), "turn"),
    "rollout.env.tokens_after_prompt": (ENV, 2),
    "rollout.env.input_tokens": (f"{ENV}; data.max_prompt_tokens=10", 10),
    "rollout.env.tool_format": (
        ENV.replace("observation", "tool_format: json, observation").replace("Game", "Caller"),
        "gpt_oss",
    ),
    "rollout.env.history": (f'{ENV}; tokenizer.chat_template="{REWRITES}"', "template"),
    "rollout.env.timeout_s": (ENV, 30.0),
    "rollout.env.hosts": (ENV, 2),
    "rollout.env.memory_mb": (ENV, 4096),
    "rollout.group_size": ("", 3),
    **sampling("rollout.sampling", ""),
    **sampling(
        "rollout.sources.*",
        "seed=1; data.train.0.name=held; rollout.sampling.max_tokens=24; rollout.sources.held={max_tokens: 4}",
    ),
    "rollout.max_num_seqs": ("", 2),
    "rollout.quantization": ("", "int8"),
    "buffer.replay.queue": (FREE, True),
    "buffer.replay.share": ("train.steps=3", 0.5),
    "buffer.replay.capacity": (f"{REPLAY}; train.tasks_per_step=4", 1),
    "buffer.replay.priority": (
        f"{REPLAY}; buffer.replay.priority={{decay: -10.0}}",
        {"name": CONTROLLED, "decay": -10.0},
    ),
    "buffer.replay.priority.decay": (REPLAY, -10.0),
    "buffer.replay.priority.use_limit": (f"{REPLAY}; buffer.replay.priority={CONTROLLED}", 1),
    "buffer.replay.priority.sigma": (f"{REPLAY}; buffer.replay.priority={CONTROLLED}", 50.0),
    "buffer.replay.cooldown": (REPLAY, 2),
    "buffer.replay.max_staleness": (REPLAY, 0),
    "rollout.sync_interval": ("", 2),
    "rollout.max_staleness": ("", 1),
    "rollout.schedule": ("rollout.max_staleness=1", "async"),
    "rollout.partial_rollout": ("rollout.max_staleness=1; rollout.schedule=async", False),
    "rollout.spare_tasks": ("rollout.max_staleness=1; rollout.schedule=async", 1),
    "rollout.retries": ("", 1),
    "rollout.timeout_factor": ("", 50.0),
    "rollout.timeout_s": ("", 30.0),
    "train.steps": ("", 3),
    "train.early_stopping.metric": (EARLY, "eval/held/tasks"),
    "train.early_stopping.goal": (EARLY, "min"),
    "train.early_stopping.patience": (EARLY, 2),
    "train.early_stopping.threshold": (f"{EARLY}; train.early_stopping.patience=2", 9.0),
    "train.epochs": ("train.steps=null; train.epochs=0.5", 0.75),
    "train.drop_last": ("train.tasks_per_step=3; train.epochs=1.5; train.steps=null", True),
    "train.tasks_per_step": ("", 3),
    "train.minibatches": ("", 2),
    "train.update_epochs": ("", 2),
    "train.shuffle_minibatches": ("train.minibatches=2; train.update_epochs=2", True),
    "train.micro_batch_tokens": ("", 20),
    "train.micro_batch_rollouts": ("", 1),
    "train.forward_micro_batch_tokens": ("", 20),
    "train.forward_micro_batch_rollouts": ("", 1),
    "train.share_prompts": ("", False),
    "train.skip_zero_weight": ("", False),
    "train.gradient_checkpointing": ("", True),
    "train.compile": ("", True),
    "train.precision.compute": ("", "bfloat16"),
    "train.precision.float8": ("model.scratch.hidden_size=32", "rowwise"),
    "train.precision.reduce": ("model.dtype=bfloat16; train.micro_batch_rollouts=1", "float32"),
    "train.precision.master_weights": ("model.dtype=bfloat16", False),
    "train.precision.loss_scale": ("model.dtype=float16", 1024.0),
    "train.trainable": ("", {"norm": False}),
    "train.router_aux_loss_coef": (MOE, 0.1),
    "train.router_aux_loss_scope": (f"{MOE}; train.router_aux_loss_coef=0.1", "layer"),
    "train.router_z_loss_coef": (MOE, 0.1),
    "train.router_replay": (f"{MOE}; rollout.max_staleness=1; train.minibatches=2", "sampled"),
    "train.temperature": ("", 0.5),
    "train.max_skipped_steps": ("", 3),
    **optimizer("train.optimizer", ""),
    "eval.interval": (EVAL, 1),
    "eval.at_start": (EVAL, False),
    "eval.at_end": (EVAL, False),
    "eval.samples": (f"{EVAL}; eval.sampling.temperature=1.0", 2),
    **sampling("eval.sampling", f"{EVAL}; eval.sampling={{temperature: 1.0, max_tokens: 4}}"),
    "eval.sources.*.samples": (f"{EVAL}; eval.sampling.temperature=1.0; eval.sources.held={{}}", 2),
    **sampling(
        "eval.sources.*.sampling", f"{EVAL}; eval.sources.held.sampling={{temperature: 1.0, max_tokens: 4}}"
    ),
    "eval.success": (EVAL, 0.3),
    "eval.reward": (f"{EVAL}; {SECOND}", "s"),
    "eval.log_samples": (EVAL, 2),
    "checkpoint.interval": ("", 1),
    "checkpoint.keep": ("checkpoint.interval=1", 1),
    "dirs.checkpoints": ("", "saved"),
    "checkpoint.async_save": ("checkpoint.interval=1", True),
    "checkpoint.keep_best.metric": (f"{BEST}; checkpoint.keep_best.count=1", "eval/held/tokens_mean"),
    "checkpoint.keep_best.goal": (BEST, "min"),
    "checkpoint.keep_best.count": (BEST, 3),
    "checkpoint.upload_to": ("", ["file://there"]),
    "checkpoint.upload_exports_to": ("checkpoint.export=true", ["file://there"]),
    "checkpoint.upload": ("checkpoint.upload_to=['file://there']; checkpoint.interval=1", "last"),
    "checkpoint.save_contents": ("", ["model"]),
    "checkpoint.export": ("", True),
    "checkpoint.export_interval": ("", 1),
    "checkpoint.export_as": ("checkpoint.export=true; model.lora.rank=2", "adapter"),
    "dirs.export": ("checkpoint.export=true", "given_away"),
    "track.trackers": ("", ["jsonl", "tensorboard"]),
    "track.project": (REMOTE, "another"),
    "track.group": (REMOTE, "together"),
    "track.tags": (REMOTE, ["good"]),
    "track.arguments": (REMOTE, {"wandb": {"entity": "team"}}),
    "track.rollouts_interval": ("", 2),
    "track.log_samples": (REMOTE, 2),
    "track.batches_interval": ("", 1),
    "dirs.rollouts": ("", "played"),
    "dirs.eval": (EVAL, "judged"),
    "track.dump.rollouts": ("", "dump/{step}.jsonl"),
    "track.dump.eval": (EVAL, "dump/{stage}/{source}-{step}.parquet"),
    "track.dump.batches": ("track.batches_interval=1", "dump/{step}.parquet"),
    "track.log_level": ("", "debug"),
    "track.micro_batches": ("", True),
    "profile.steps": ("", [2]),
    "profile.warmup": ("profile.steps=[2]", 0),
    "profile.torch": ("profile.steps=[2]", ["record_shapes"]),
    "dirs.profile": ("profile.steps=[2]", "traces"),
    "reward_workers.count": ("", 2),
    "reward_workers.env": ("rewards.r.function='rows.py:environment'", {"MARK": "2"}),
    "reward_workers.timeout_s": ("", 5.0),
    "reward_workers.sandbox": ("", "all"),
    "reward_workers.memory_mb": ("", 1024),
    "machine.threads": ("", 2),
    "machine.logprob_parity": ("", "auto"),
    "machine.kernels": ("", "torch"),
    "machine.kv_cache_mb": ("", 8),
    "machine.watchdog_timeout_s": ("", 7200.0),
    "stages.*.name": ("stages=[{name: one}]", "two"),
    "stages.*.algorithm": ("stages=[{name: one}]", {"loss": "reinforce"}),
    "stages.*.data": ("stages=[{name: one}]", {"order": "sequential"}),
    "stages.*.rewards": ("stages=[{name: one}]", {"r": {"arguments": {"salt": "z"}}}),
    "stages.*.rollout": ("stages=[{name: one}]", {"sync_interval": 2}),
    "stages.*.buffer": ("stages=[{name: one}]; train.steps=3", {"replay": {"share": 0.5}}),
    "stages.*.train": ("stages=[{name: one}]", {"update_epochs": 2}),
    "stages.*.critic": (f"{PPO}; stages=[{{name: one}}]", {"update_epochs": 2}),
    "stages.*.reference": (f"{REFERENCE}; stages=[{{name: one}}]", {"reset_interval": 1}),
    "stages.*.eval": (f"{EVAL}; stages=[{{name: one}}]", {"interval": 1}),
}

REFUSED: dict[str, tuple[str, Any, str]] = {
    "data.eval.*.weight": (EVAL, 2.0, "evaluation uses every row once"),
    "data.eval.*.difficulty": (EVAL, "hard", "in the order of the file"),
    **{
        f"data.demonstrations.*.{key}": (MIX, value, said)
        for key, value, said in (
            ("answer", "answer2", "only prompt and response are read"),
            ("rejected", "rejected2", "only prompt and response are read"),
            ("desirable", "desirable2", "only prompt and response are read"),
            ("label", "kind", "only prompt and response are read"),
            ("rewards", ["r"], "not scored"),
        )
    },
    "machine.device": ("", "cuda", "torch finds no CUDA device"),
    "train.offload": ("", ["optimizer"], "frees memory of a GPU"),
    "profile.tools": (
        "profile.steps=[2]; train.steps=2",
        ["memory"],
        "memory: memory snapshots and nsys ranges need CUDA",
    ),
}
"""Keys with a value that is refused wherever it stands: (context, value, what is said of it)."""

CASES = {name: case for name, case in CASES.items() if name not in REFUSED}

ENDS: dict[str, tuple[str, Any, str]] = {
    **{
        f"data.{part}.*.expect": (context, {"kind": "none"}, "and the source expects 'none'")
        for part, context in (("train", ""), ("eval", EVAL), ("demonstrations", MIX))
    },
    "reference.models.*.values": (TEACHERS, ["y"], "'x' is a value of no model of reference.models"),
    "reference.column": (TEACHERS, "school", "its column 'school' is None"),
    "algorithm.max_refills": (
        "algorithm.dynamic_sampling=true; rewards={f: {function: format, arguments: {pattern: '^$'}}}",
        3,
        "of 8 tasks",
    ),
    "reward_workers.max_failure_rate": (
        "rewards.r.function='rows.py:half'; rollout.group_size=8",
        0.0,
        "reward_workers.max_failure_rate 0 allows",
    ),
    "machine.memory_mb": ("model.scratch.hidden_size=256", 1, "machine.memory_mb has 1 MiB"),
    "checkpoint.resume": ("", "nowhere", "checkpoint.resume=nowhere: no such folder"),
}
"""Keys whose effect is that a run ends with an error, or with another one: (context, value, what is said)."""

CLUSTER = (
    "rollout.replicas", "cluster.address", "cluster.placement", "cluster.cpus", "cluster.gpus", "cluster.restarts",
    "cluster.health_timeout_s", "cluster.start_timeout_s",
)  # fmt: skip

SERVER = tuple(
    f"rollout.server.{name}"
    for name in (
        "urls", "token", "command", "options", "env", "weights_dir", "canary_bound", "timeout_s",
        "start_timeout_s", "restarts", "model", "lora", "sleep", "proxy",
    )
)  # fmt: skip

PARTS = ("cluster.ranks", "cluster.reward_hosts", "cluster.explorers")

RANKS = tuple(
    f"train.parallel.{name}"
    for name in (
        "dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "pipeline_chunks", "reshard_after_forward",
        "wrap_min_num_params", "prefetch", "separate_ranks", "timeout_s",
    )
)  # fmt: skip

DEEPSPEED = ("train.engine", "train.engine_arguments")

APART = (
    "mode", "buffer.url", "buffer.order", "buffer.lease_s", "buffer.explorer_name", "sync.dtype", "sync.timeout_s",
    "sync.keep", "sync.method", "sync.content", "sync.driven_by",
)  # fmt: skip

BELOW: dict[str, str] = {
    "critic.head": "weights with a head are refused without it",
    "algorithm.advantage.divide_by_turns": "episodes of one turn are divided by 1",
    "algorithm.advantage.reset_at_turns": "episodes of one turn have no earlier one",
    "checkpoint.load_contents": "what is read when a run goes on",
    **dict.fromkeys(RANKS, "processes start for it: test_ranks_run.py has a test of each"),
    **dict.fromkeys(DEEPSPEED, "ranks start for it: test_deepspeed.py has a test of each"),
    "profile.ranks": "ranks start for it: test_profile.py",
    "checkpoint.sharded": "ranks start for it: test_checkpoint_parts.py",
    **dict.fromkeys(APART, "of processes that explore and train apart: test_apart.py has a test of each"),
    **dict.fromkeys(PARTS, "Ray starts for it: test_cluster_parts.py has a test of each"),
    **dict.fromkeys(SERVER, "a server is asked for it: test_http_keys.py has a test of each"),
    **dict.fromkeys(CLUSTER, "Ray starts for it: test_cluster.py has a test of each"),
    "eval.offline": "training refuses it, `whet eval` reads it: test_offline_eval.py",
    "track.dump.replies": "training refuses it, `whet generate` writes it: test_generate.py",
}
"""Keys that a single training run cannot show; the last tests of test_dead_native.py are theirs."""

LATER = frozenset({
    "critic.warmup_steps", "critic.optimizer.schedule.weight_decay_end", "data.demonstrations.*.rows",
    "data.demonstrations.*.weight", "algorithm.entropy_control.target",
    "algorithm.entropy_control.delta", "algorithm.entropy_control.min",
    "algorithm.entropy_control.max", "algorithm.kl.estimator", "algorithm.reward_kl.estimator",
    "algorithm.reward_kl.target", "algorithm.reward_kl.horizon", "algorithm.correction.weight.outside",
    "algorithm.correction.weight.normalize", "algorithm.correction.denominator",
    "algorithm.correction.reject.*.over", "algorithm.correction.reject.*.low",
    "algorithm.groups.uniform.ddof", "algorithm.loss.fallback_to_policy_gradient",
    "algorithm.loss.ratio_epsilon", "train.optimizer.schedule.weight_decay_end", "eval.interval",
    "checkpoint.interval", "checkpoint.keep", "checkpoint.upload",
    "profile.steps", "profile.warmup", "profile.torch", "dirs.profile", "stages.*.eval",
})  # fmt: skip
"""Keys of CASES that a first step does not show: their runs have two."""
