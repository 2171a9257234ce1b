#!/usr/bin/env bash
# A run is killed with SIGKILL and resumed by the same command; then it is compared with an uninterrupted run.
# Arguments are overrides of the config.
set -euo pipefail

whet train docs/tutorials/vowels.yaml run_dir=runs/unbroken "$@"

KILLED=(whet train docs/tutorials/vowels.yaml run_dir=runs/killed "$@")
"${KILLED[@]}" &
PID=$!
until [[ -n $(ls runs/killed/checkpoints 2> /dev/null) ]]; do sleep 0.1; done
kill -KILL "$PID"
wait "$PID" || echo "ended with exit code $?"

"${KILLED[@]}"
cmp runs/unbroken/metrics.jsonl runs/killed/metrics.jsonl && echo "the same metrics, byte for byte"
