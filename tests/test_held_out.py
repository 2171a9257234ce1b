"""The loss of given held-out replies by hand, and `whet eval` on a run's checkpoints against the run itself."""

from __future__ import annotations

import filecmp
import json
import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forked import whet
from sections import algorithm as section
from tiny import RUN, tiny_model
from whet import evaluate, train
from whet.algos.preference import kl_zero
from whet.algos.recipes import build
from whet.batch import Batch
from whet.config.schema import AlgorithmConfig, CriticConfig
from whet.eval_loss import eval_loss, given
from whet.models import kernels
from whet.replay.logprobs import rescored
from whet.replay.steps import read
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import ConfigError, DataError, Group, Json, Rollout, Task

ROOT = Path(__file__).parents[1]

# ---------------------------------------------------------------- numbers


def group(source: str, prompt: list[int], *replies: list[int]) -> Group:
    """Replies to a task; the first is the better one."""
    task = Task(uid=0, source=source, prompt="", token_ids=tuple(prompt))
    rollouts = [
        Rollout.one_strand(
            task=task, index=i, token_ids=prompt + reply, mask=[0] * len(prompt) + [1] * len(reply),
            logprobs=[0.0] * len(prompt + reply), sample_logprobs=[0.0] * len(prompt + reply),
            versions=[-1] * len(prompt + reply), finish_reason="stop", reward=float(i == 0),
        )
        for i, reply in enumerate(replies)
    ]  # fmt: skip
    return Group(task, tuple(rollouts))


def engine(seed: int) -> TorchEngine:
    ops = kernels.load("torch")
    return TorchEngine(tiny_model(seed=seed, std=0.4), ops, cut=MicroBatchPolicy(max_tokens=9))


def reply_logp(policy: TorchEngine, prompt: list[int], reply: list[int]) -> list[float]:
    """log pi of each token of the reply, by the model's own forward, one sequence at a time."""
    with torch.no_grad():
        logits = policy.module(torch.tensor([prompt + reply])).logits[0].double()
    rows = torch.log_softmax(logits, dim=-1)
    return [float(rows[len(prompt) + i - 1, token]) for i, token in enumerate(reply)]


def algorithm(name: str, **settings: Json):  # type: ignore[no-untyped-def]
    return build(
        AlgorithmConfig.model_validate(section(name, **settings)), critic=CriticConfig(), max_tokens=8
    )


def test_loss_and_perplexity_of_demonstrations() -> None:
    policy = engine(seed=1)
    cases = {"a": [([5, 6], [7, 8, 1]), ([9], [10, 1])], "b": [([11, 12, 13], [14])]}
    groups = [group(s, prompt, reply) for s, members in cases.items() for prompt, reply in members]
    m = eval_loss(policy, groups, algorithm("sft"), look=lambda batch: batch)
    every = []
    for source, members in cases.items():
        logp = [x for prompt, reply in members for x in reply_logp(policy, prompt, reply)]
        every += logp
        assert m[f"eval/{source}/loss_nats"] == pytest.approx(-math.fsum(logp) / len(logp), rel=1e-5)
        assert m[f"eval/{source}/loss_tokens"] == len(logp)
    # over all: every token counts once, so the longer source counts more
    assert m["eval/all/loss_nats"] == pytest.approx(-math.fsum(every) / 6, rel=1e-5)
    assert m["eval/all/perplexity"] == math.exp(m["eval/all/loss_nats"])
    assert all(p.grad is None for p in policy.module.parameters())


def test_preferences_on_held_out_pairs() -> None:
    policy, reference = engine(seed=1), engine(seed=2)
    pairs = [([5, 6], [7, 8, 1], [9, 1]), ([9], [10, 1], [3, 4, 2, 1]), ([4, 4], [3], [2])]

    def look(batch: Batch) -> Batch:
        return replace(batch, logp_ref_N=reference.forward(batch, "logprobs"))

    m = eval_loss(policy, [group("p", *pair) for pair in pairs], algorithm("dpo", beta=0.3), look=look)

    def implied(prompt: list[int], reply: list[int]) -> float:
        return 0.3 * (sum(reply_logp(policy, prompt, reply)) - sum(reply_logp(reference, prompt, reply)))

    margins = [implied(prompt, better) - implied(prompt, worse) for prompt, better, worse in pairs]
    assert min(margins) < 0 < max(margins), "no case of its own"
    assert m["eval/p/accuracy"] == pytest.approx(sum(x > 0 for x in margins) / 3)
    assert m["eval/p/margin"] == pytest.approx(sum(margins) / 3, rel=1e-4)
    assert m["eval/p/loss"] == pytest.approx(sum(math.log1p(math.exp(-x)) for x in margins) / 3, rel=1e-4)
    assert m["eval/p/replies"] == 6


def test_a_source_of_one_labelled_reply_is_measured_among_all(caplog: pytest.LogCaptureFixture) -> None:
    policy, reference = engine(seed=1), engine(seed=2)

    def look(batch: Batch) -> Batch:
        zero_R = kl_zero(batch, policy=policy.forward, reference=reference.forward)
        return replace(batch, logp_ref_N=reference.forward(batch, "logprobs"), kl_zero_R=zero_R)

    one, *others = group("a", [4], [3, 1]), group("b", [5, 6], [7, 8, 1]), group("b", [9], [10, 1])
    with caplog.at_level(logging.WARNING, "whet"):
        m = eval_loss(policy, [one, *others], algorithm("kto"), look=look)
    assert {name.split("/")[1] for name in m} == {"b", "all"}
    assert (m["eval/b/replies"], m["eval/all/replies"]) == (2, 3)
    assert "held-out replies: a has a single one" in caplog.text
    alone = eval_loss(policy, others, algorithm("kto"), look=look)
    assert alone == {name: x for name, x in m.items() if name.startswith("eval/b/")}


# ---------------------------------------------------------------- which tasks


def test_tasks_without_a_reply() -> None:
    tasks = [Task(uid=0, source="a", prompt="", response="x"), Task(uid=1, source="a", prompt="")]
    assert given(tasks, "demonstrations", judged=True, fits=lambda task, text: True) == tasks[:1]
    with pytest.raises(
        DataError, match=r"held-out task 1 of source 'a' has no response, and there are no rewards"
    ):
        given(tasks, "demonstrations", judged=False, fits=lambda task, text: True)
    with pytest.raises(DataError, match="held-out task 0 of source 'a' has no rejected"):
        given(tasks, "preferences", judged=False, fits=lambda task, text: True)
    assert given(tasks, "preferences", judged=True, fits=lambda task, text: True) == []
    label = Task(uid=2, source="a", prompt="", response="x", extra={"desirable": False})
    assert given([*tasks, label], "labels", judged=True, fits=lambda task, text: True) == [label]


def test_too_long_replies_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    tasks = [Task(uid=i, source="a", prompt="", response="x" * i, rejected="y" * 3) for i in range(1, 5)]
    with caplog.at_level(logging.WARNING, logger="whet"):
        kept = given(tasks, "preferences", judged=True, fits=lambda task, text: len(text) <= 3)
    assert [t.uid for t in kept] == [1, 2, 3]
    assert "1 of 4 are too long and are left out" in caplog.text


@pytest.mark.parametrize(
    ("overlong", "said", "tokens"),
    [
        ("filter", "held-out replies: 1 of 2 are too long and are left out", 4),
        ("truncate_right", "held-out replies: 1 of 2 are too long and are cut", 8),
    ],
)
@pytest.mark.parametrize(
    ("row", "learned"),
    [
        pytest.param({"prompt": "a"}, ("bcd", "bcdef"), id="replies"),
        pytest.param({}, ("abcd", "abcdef"), id="whole texts"),
    ],
)
def test_a_reply_of_as_many_tokens_as_may_be_is_measured_and_a_longer_one_is_counted(
    row: dict[str, str], learned: tuple[str, ...], overlong: str, said: str, tokens: int, tmp_path: Path
) -> None:
    column = "response" if row else "text"
    held_out = [{**row, column: text} for text in learned]
    rows = [{**row, "prompt": "b", column: "fed"} if row else {column: "fedc"}]
    sources = {"train": [{"rows": rows, "name": "t"}], "eval": [{"rows": held_out, "name": "e"}]}
    told = {
        "rewards": {},
        "algorithm": "sft",
        "eval": {"interval": 1},
        "rollout": {"sampling": {"max_tokens": 4}},
    }
    data = {"max_prompt_tokens": 8, "overlong": overlong, **sources}
    result = train(
        **{**RUN, **told, "data": data}, run_dir=str(tmp_path / "run"), overrides=["train.steps=1"]
    )
    assert [x["eval/e/loss_tokens"] for x in result.metrics if "eval/e/loss_tokens" in x] == [tokens, tokens]
    assert said in (tmp_path / "run" / "run.log").read_text()


def test_replies_without_a_token_have_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    """As data.overlong may cut them."""
    some = [group("a", [4, 5], []), group("b", [4, 5], [6, 1])]
    with caplog.at_level(logging.WARNING, logger="whet"):
        found = eval_loss(engine(0), some, algorithm("sft"), look=lambda batch: batch)
    assert {name.split("/")[1] for name in found} == {"b", "all"}
    assert found["eval/all/loss_nats"] == found["eval/b/loss_nats"]
    assert "of a, data.overlong has left no token of a reply" in caplog.text


def test_a_reply_that_may_not_be_too_long_is_told_by_its_line(tmp_path: Path) -> None:
    """As one that is trained on is."""
    held_out = tmp_path / "held_out.jsonl"
    lines = [{"prompt": "a", "response": text} for text in ("bcd", "bcdef")]
    held_out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    train_on = [{"rows": [{"prompt": "b", "response": "fed"}], "name": "t"}]
    told = {"rewards": {}, "algorithm": "sft", "rollout": {"sampling": {"max_tokens": 4}}}
    data = {"max_prompt_tokens": 8, "train": train_on, "eval": [{"path": str(held_out)}]}
    with pytest.raises(
        DataError, match=r"held_out\.jsonl, line 2: its response has 6 tokens, the limit is 4"
    ):
        train(**{**RUN, **told, "data": data}, run_dir=str(tmp_path / "run"))


# ---------------------------------------------------------------- a whole run, and its checkpoints again

CONFIG = """
seed: 3
model: {scratch: {hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, max_position_embeddings: 64}}
tokenizer: {build: chars}
data:
  max_prompt_tokens: 16
  train: [{path: PLACE/train.jsonl}]
  eval: [{path: PLACE/held_out.jsonl, name: words}, {path: PLACE/held_out.jsonl, name: more, limit: 3}]
rewards: {right: {function: exact}}
rollout: {group_size: 4, sampling: {max_tokens: 8}}
checkpoint: {interval: 2, export: false, keep: 9}
track: {trackers: [jsonl]}
machine: {threads: 1}
stages:
  - name: sft
    algorithm: {name: sft}
    train: {steps: 4, tasks_per_step: 4, optimizer: {lr: 3e-3}}
    eval: {interval: 2}
  - name: rl
    algorithm: {name: reinforce}
    train: {steps: 4, tasks_per_step: 4, optimizer: {lr: 1e-3}}
    eval:
      interval: 2
      sampling: {temperature: 1.0}
      sources: {more: {samples: 4}}
      log_samples: 5
"""


def evaluations(run_dir: Path) -> list[dict[str, Json]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if any(key.startswith("eval/") for key in line)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("data")
    for name, source in (("train", "words"), ("held_out", "held_out")):
        rows = map(json.loads, (ROOT / f"tests/data/{source}.jsonl").read_text().splitlines())
        lines = (json.dumps({**row, "response": row["answer"]}) + "\n" for row in rows)
        (place / f"{name}.jsonl").write_text("".join(lines))
    (place / "run.yaml").write_text(CONFIG.replace("PLACE", str(place)))
    return place / "run.yaml"


@pytest.fixture(scope="module")
def run(config: Path) -> Path:
    whet("train", str(config), f"run_dir={config.parent / 'run'}")
    return config.parent / "run"


def test_a_run_has_loss_and_accuracy_as_its_stages_say(run: Path) -> None:
    found = {(line["stage"], line["step"]): line for line in evaluations(run)}
    assert sorted(found) == [(stage, step) for stage in ("rl", "sft") for step in (0, 2, 4)]
    sft, rl = found["sft", 4], found["rl", 4]
    assert sft["eval/words/loss_nats"] < found["sft", 0]["eval/words/loss_nats"]
    assert sft["eval/all/loss_tokens"] == sft["eval/words/loss_tokens"] + sft["eval/more/loss_tokens"]
    assert "eval/words/mean@1" in sft
    assert not [key for key in rl if "loss" in key], "nothing is learned from given replies there"
    assert {"eval/words/mean@1", "eval/more/mean@4", "eval/more/best@2", "eval/all/mean@1"} <= rl.keys()
    assert "eval/more/mean@1" not in rl


def test_the_time_of_rewards_is_that_of_training(run: Path) -> None:
    """The first stage asks them in its evaluations alone."""
    lines = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    told = {(line["stage"], line["step"]) for line in lines if "reward/seconds/right" in line}
    assert told == {("rl", step) for step in (1, 2, 3, 4)}


def test_shown_samples_stand_beside_the_replies(run: Path) -> None:
    lines = [(run / "eval" / f"rl-step-00000{step}.jsonl").read_text().splitlines() for step in (0, 4)]
    first, last = ([json.loads(line) for line in part] for part in lines)
    assert len(first) == 5
    assert [row["uid"] for row in first] == [row["uid"] for row in last]
    assert set(first[0]) == {"uid", "source", "prompt", "reply", "answer", "extracted", "reward"}
    assert not (run / "eval" / "sft-step-000000.jsonl").exists()


def test_every_checkpoint_gives_the_numbers_that_the_run_gave(run: Path, tmp_path: Path) -> None:
    out = whet("eval", str(run), "-o", str(tmp_path / "found.json"))
    during = [line for line in evaluations(run) if line["step"] > 0]
    assert json.loads((tmp_path / "found.json").read_text()) == during == evaluations(run / "bench")
    for step in (2, 4):
        name = f"rl-step-00000{step}.parquet"
        assert filecmp.cmp(run / "eval" / name, run / "bench" / "eval" / name, shallow=False)
    assert "rl step 4" in out
    assert "mean@4" in out


def test_of_a_config_file_its_model_is_evaluated(run: Path, config: Path, tmp_path: Path) -> None:
    """As the run did before its first step; also where no step is to follow, which only an evaluation takes."""
    none = [f"stages.{stage}.train.steps=0" for stage in ("sft", "rl")]
    place = f"run_dir={tmp_path / 'alone'}"
    whet("eval", str(config), place, *none, "-o", str(tmp_path / "found.json"))
    assert json.loads((tmp_path / "found.json").read_text()) == evaluations(run)[:1]
    with pytest.raises(
        ConfigError, match=r"train\.steps: got 0, so nothing is trained; .* run `whet eval .*run\.yaml`"
    ):
        train(config, overrides=[place, *none])
    with pytest.raises(
        ConfigError, match=r"run\.yaml is a config file, not a run: .* leave stage and step out"
    ):
        evaluate(config, step=2)
    before = {path: path.read_bytes() for path in (run / "bench").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"has checkpoints: `whet eval .*run` evaluates them"):
        evaluate(config, overrides=[f"run_dir={run}"])
    assert before == {path: path.read_bytes() for path in (run / "bench").rglob("*") if path.is_file()}


def test_checkpoints_may_be_asked_otherwise(run: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    whet("eval", str(run), "stages.rl.eval.sources.more.samples=2")
    assert all("eval/more/mean@2" in line for line in evaluations(run / "bench") if line["stage"] == "rl")
    assert (run / "metrics.jsonl").read_bytes() == before, "the run itself is only read"


def test_a_run_that_goes_on_from_an_older_checkpoint_evaluates_the_same(run: Path, config: Path) -> None:
    again = config.parent / "again"
    shutil.copytree(run, again, ignore=shutil.ignore_patterns("bench"))
    shutil.rmtree(again / "checkpoints" / "1-rl-000004")
    (again / "eval" / "rl-step-000004.jsonl").write_text("of a run that was killed\n")
    whet("train", str(config), f"run_dir={again}")
    assert evaluations(again) == evaluations(run)
    names = sorted(path.name for path in (run / "eval").iterdir())
    assert names == sorted(path.name for path in (again / "eval").iterdir())
    assert filecmp.cmpfiles(run / "eval", again / "eval", names, shallow=False)[0] == names


def test_what_cannot_be_evaluated_is_said(tmp_path: Path) -> None:
    from whet.bench import config_of, judge_checkpoints
    from whet.types import CheckpointError

    with pytest.raises(ConfigError, match=r"has no config\.yaml; give a run directory"):
        config_of(tmp_path, [])
    (tmp_path / "config.yaml").write_text(CONFIG.replace("PLACE", str(tmp_path)))
    with pytest.raises(ConfigError, match=r"there is nothing to evaluate: .*\(--offline FILE\)$"):
        judge_checkpoints(config_of(tmp_path, ["data.eval=[]", "stages=[{name: sft, train: {steps: 2}}]"]))
    with pytest.raises(CheckpointError, match="has no checkpoint to evaluate"):
        judge_checkpoints(config_of(tmp_path, []))


def test_a_run_whose_columns_were_recognised_is_evaluated_without_the_data_it_learned_from(
    tmp_path: Path,
) -> None:
    """`chosen` is recognised where a run reads it. The loss of DPO needs a model that an evaluation does not have."""
    pairs = [{"prompt": f"{w}>", "answer": w[::-1], "chosen": w[::-1], "rejected": w} for w in ("ab", "cab")]
    model = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16,
        "intermediate_size": 32, "max_position_embeddings": 32,
    }  # fmt: skip
    run = train(
        algorithm="dpo",
        data={"train": pairs, "eval": pairs, "exclude_eval": False, "max_prompt_tokens": 16},
        model={"scratch": model},
        tokenizer={"build": "chars"},
        rollout={"sampling": {"max_tokens": 4}},
        train={"steps": 1, "tasks_per_step": 2},
        track={"trackers": ["jsonl"]},
        run_dir=str(tmp_path / "run"),
    ).run_dir
    assert "eval/loss" in (run / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match="no token of step 1 of stage 'main'; its replies were given"):
        rescored(read(run), 0, 1)
    for file in (run / "data").glob("train-*"):
        file.unlink()
    with pytest.raises(
        ConfigError, match=r"'main' \(dpo\): the loss .* needs the reference .*: --reward math"
    ):
        evaluate(run)

    def length(response: str) -> float:
        return float(len(response))

    (line,) = evaluate(run, rewards=length)
    assert line["eval/eval/tasks"] == 2
    assert "eval/loss" not in line


@pytest.mark.parametrize("name", ["7", "x #1", "true", "a: b", "two\nlines"])
def test_a_run_directory_may_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from whet.bench import config_of

    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    (Path(name) / "config.yaml").write_text("data: {train: [{name: w, path: w.jsonl}]}\ntrain: {steps: 1}\n")
    assert config_of(Path(name), []).config.run_dir == name


def test_trackers_that_show_text_are_given_the_samples(tmp_path: Path) -> None:
    from whet.config.schema import Config
    from whet.track.record import RunDirectory
    from whet.track.trackers import Bounded, Jsonl, ShowsText, TensorBoard, open_trackers

    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    record = RunDirectory(tmp_path, ["rl"])
    cfg = Config.model_validate_json('{"track": {"trackers": ["tensorboard"]}}')
    trackers = open_trackers(cfg, record)
    rows = [{"uid": 7, "source": "a", "prompt": "abc>", "reply": "cba", "answer": "cba", "reward": 1.0}]
    for tracker in trackers:
        shows = isinstance(tracker, Bounded) and isinstance(tracker.tracker, TensorBoard)
        assert isinstance(tracker, ShowsText) == shows
        assert shows or isinstance(tracker, Jsonl)
        if isinstance(tracker, ShowsText):
            tracker.show("rl", 3, rows)
            tracker.show_rollouts("rl", 3, [{**rows[0], "index": 1}, {**rows[0], "uid": 8, "index": 0}])
        tracker.close()
    found = events.EventAccumulator(str(tmp_path / "tensorboard" / "rl"))
    found.Reload()
    (event,) = found.Tensors("eval/7/text_summary")
    assert event.step == 3
    assert all(word in event.tensor_proto.string_val[0].decode() for word in ("abc>", '"reply": "cba"'))
    tags = [f"rollout/sample_{n}/text_summary" for n in (1, 2)]
    assert [tag for tag in found.Tags()["tensors"] if tag.startswith("rollout/")] == tags
    (event,) = found.Tensors(tags[1])
    assert event.step == 3
    assert '"uid": 8' in event.tensor_proto.string_val[0].decode()
