#!/usr/bin/env bash
# The update on two ranks, which share parameters, gradients and optimizer state (FSDP2). On a CPU they use gloo.
# Arguments are overrides of the config.
set -euo pipefail

whet train docs/tutorials/vowels.yaml run_dir=runs/ranks train.parallel.dp_shard=2 "$@"
