#!/usr/bin/env bash
# The three schedules of one process. Arguments are overrides of the config.
set -euo pipefail

whet train docs/tutorials/vowels.yaml run_dir=runs/synchronous "$@"
whet train docs/tutorials/vowels.yaml run_dir=runs/overlapped rollout.max_staleness=1 "$@"
whet train docs/tutorials/vowels.yaml run_dir=runs/asynchronous rollout.max_staleness=2 rollout.schedule=async \
    algorithm.correction.weight=token "$@"
