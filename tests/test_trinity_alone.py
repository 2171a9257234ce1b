"""Trinity-RFT's trainer and bench as processes without a taskset of training: the explorers alone draw tasks."""

from __future__ import annotations

import json
from pathlib import Path

from forked import Started
from test_trinity import folder  # noqa: F401 (a fixture)
from whet.buffer.stores import open_store

SHARED = """
project: p
name: alone
checkpoint_root_dir: ROOT
algorithm: {algorithm_type: grpo, repeat_times: 4}
model: {model_path: FOLDER, max_prompt_tokens: 8, max_response_tokens: 4}
synchronizer: {sync_method: checkpoint, sync_style: dynamic_by_explorer, sync_interval: 1, sync_timeout: 60}
monitor: {monitor_type: tensorboard}
log: {level: WARNING}
"""
QUEUE = "trainer_input: {experience_buffer: {name: b, storage_type: queue, path: 'sqlite:///ROOT/b.db'}}"
TASKS = "format: {response_key: answer}, default_reward_fn_type: 'ROOT/own.py:share'"
TRAIN = f"""
mode: train
buffer:
  train_batch_size: 8
  {QUEUE}
trainer: {{total_steps: 3, save_interval: 3, save_hf_checkpoint: never}}
"""
EXPLORE = f"""
mode: explore
buffer:
  batch_size: 2
  total_epochs: 100
  {QUEUE}
  explorer_input: {{taskset: {{path: ROOT/tasks.jsonl, {TASKS}}}}}
explorer: {{name: one, runner_per_model: 4}}
"""
BENCH = f"""
mode: bench
buffer:
  batch_size: 2
  explorer_input: {{eval_tasksets: [{{name: held, path: ROOT/tasks.jsonl, {TASKS}}}]}}
"""


def test_a_trainer_and_a_bench_have_no_taskset(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    """The trainer trains on what the explorer has scored, and the bench scores by its own reward."""
    tasks = [{"prompt": a + b, "answer": a} for a in "bcde" for b in "bc"]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    (tmp_path / "own.py").write_text(
        "def share(response, **kw):\n    return response.count('a') / max(len(response), 1)\n"
    )
    for name, own in (("train", TRAIN), ("explore", EXPLORE), ("bench", BENCH)):
        text = (SHARED + own).replace("ROOT", str(tmp_path)).replace("FOLDER", str(folder))
        (tmp_path / f"{name}.yaml").write_text(text)

    def started(name: str) -> Started:
        more = ["whet.machine.threads=1", "whet.track.trackers=[jsonl]"]
        return Started("train", str(tmp_path / f"{name}.yaml"), *more, said=tmp_path / f"{name}.log")

    running = [started("train"), started("explore")]
    ends = [each.wait(180.0) for each in running]
    assert ends == [0, 0], [(tmp_path / f"{name}.log").read_text() for name in ("train", "explore")]
    run = tmp_path / "p" / "alone"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "train/loss" in line]) == 3
    store = open_store(f"sqlite:///{tmp_path}/b.db", queue="alone/main", order="arrival")
    assert store.ledger()["trained"] == 3 * 8
    store.close()
    assert started("bench").wait(180.0) == 0, (tmp_path / "bench.log").read_text()
    (benched,) = [json.loads(line) for line in (run / "bench" / "metrics.jsonl").read_text().splitlines()]
    assert benched["step"] == 3
    assert 0.0 < benched["eval/held/reward_mean"] < 1.0
