#!/usr/bin/env bash
# Needs: the model that `whet train examples/first_run.yaml` exports (a minute). Takes: a quarter of a minute on one CPU core.
#
# from_verl.yaml as a launch script of verl, run as is: `whet train examples/from_verl.sh`, or with arguments and
# variables of the script: `EPOCHS=5 whet train examples/from_verl.sh trainer.test_freq=10`.
set -euo pipefail

MODEL=${MODEL:-runs/first_run/export/sft}
EPOCHS=${EPOCHS:-10}

DATA=(
    data.train_files=examples/words.jsonl
    data.val_files=examples/held_out.jsonl
    data.train_batch_size=16
    data.max_prompt_length=16
    data.max_response_length=7
)

python3 -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.optim.lr=3e-4 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=64 \
    actor_rollout_ref.ref.fsdp_config.param_offload=False \
    custom_reward_function.path=examples/verl_reward.py \
    custom_reward_function.name=spelled \
    trainer.total_epochs="$EPOCHS" \
    trainer.test_freq=20 \
    trainer.n_gpus_per_node=1 \
    trainer.logger='["console"]' \
    trainer.experiment_name=from_verl \
    trainer.default_local_dir=runs/from_verl \
    "$@" 2>&1 | tee from_verl.log
