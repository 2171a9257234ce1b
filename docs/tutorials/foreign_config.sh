#!/usr/bin/env bash
# A file of verl: what it means here, on which machines it would fit, and the same as a native file.
set -euo pipefail

whet plan examples/from_verl.yaml --gpus 8 --mem 80 > plan.txt
whet convert examples/from_verl.yaml -o native.yaml --report report.md > /dev/null
grep -n "train_batch_size" report.md
grep -n "tasks_per_step" native.yaml
