#!/usr/bin/env bash
# A run that does not learn, what `whet show` reports about it, and the run continued with the correct reward.
# Arguments are overrides of the config.
set -euo pipefail

RUN=(docs/tutorials/own_model.yaml run_dir=runs/wrong train.steps=10)

whet train "${RUN[@]}" 'rewards.first=docs/tutorials/wrong_reward.py:first_letter' checkpoint.interval=8 "$@"
whet show runs/wrong | grep -A 1 "is it learning"
whet show runs/wrong --step 8 --limit 2
grep -m 1 "compared '" runs/wrong/run.log

whet train "${RUN[@]}" --change train.steps=16 "$@"   # the reward of the file again: a branch of the same run
whet show runs/wrong | grep -A 1 "is it learning"
