#!/usr/bin/env bash
# Two explorers and a trainer, each a process of its own, over one store. Arguments are overrides of the config.
# The result is that of one process: rollout.schedule is deterministic by default.
set -euo pipefail

RUN=(docs/tutorials/vowels.yaml run_dir=runs/explorers buffer.url=sqlite:///runs/explorers.db "$@")
mkdir -p runs

whet train "${RUN[@]}" mode=explore buffer.explorer_name=one &
whet train "${RUN[@]}" mode=explore buffer.explorer_name=two &
whet train "${RUN[@]}" mode=train
wait
