"""What a user adds without a change to whet: functions with settings, a reward, a tracker, an engine."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import whet
from whet.config.load import load
from whet.tables import load_object
from whet.types import ConfigError, WhetError

MINE = '''
import json
from whet.batch import Loss
from whet.rollout.scripted import ScriptedEngine

def tilted(batch, out, *, tilt: float = 1.0, tokens: bool = True):
    """Policy gradient, tilted."""
    loss_N = -batch.adv_N * out.logp_N * tilt
    return Loss(loss_N, {"tilt": loss_N.detach() * 0 + tilt})

def centred(batch, *, reward_N, scale: float = 1.0):
    """Reward less a half, at every token."""
    return (batch.reward_R[batch.rollout_N] - 0.5) * scale * batch.mask_N, None

def divided(batch):
    """By a standard deviation that is 0, as where all rewards are equal."""
    equal_R = batch.reward_R * 0
    return (equal_R / equal_R.std())[batch.rollout_N].where(batch.mask_N, float("nan")), None

def unsampled(batch):
    """Not finite where nothing was sampled, which says nothing."""
    return batch.reward_R[batch.rollout_N].where(batch.mask_N, float("inf")), None

def halved(batch, log_N, *, factor: float = 1.0):
    """An importance weight that is the same for every token."""
    return log_N * 0 + factor

def unfinished(batch, out):
    return Loss(-batch.adv_N * out.logp_N + float("nan"), {})

def without(batch, out, *, uid: int, index: int):
    """Not finite for one rollout."""
    wrong_R = (batch.uid_R == uid) & (batch.index_R == index)
    return Loss(-out.logp_N.masked_fill(wrong_R[batch.rollout_N], float("nan")), {})

def rooted(batch, out):
    """Finite, but its gradient is not."""
    change_N = out.logp_N - out.logp_N.detach()
    return Loss(change_N.sqrt() - out.logp_N, {})

def only_sampled(batch, out):
    """Not finite where nothing was sampled, which says nothing."""
    return Loss((-batch.adv_N * out.logp_N).where(batch.mask_N, float("nan")), {})

def detached(batch, out):
    return Loss(-batch.adv_N * out.logp_N.detach(), {})

def misshapen(batch, log_N):
    return log_N.sum()

def letters(response, *, letter):
    return float(response.count(letter) > 0)

class Lines:
    """One line a step."""
    def __init__(self, sinks, *, file):
        self.file = open(file, "a", encoding="utf-8")
    def log(self, stage, step, *, metrics, timings):
        self.file.write(json.dumps({"step": step, **metrics}) + "\\n")
        self.file.flush()
    def close(self):
        self.file.close()

def parrot(inputs):
    """Says the last token of the prompt again, as often as it may."""
    return ScriptedEngine(
        lambda prompt, sampling, version: prompt[-1:] * sampling.max_tokens,
        end_token_ids=inputs.end_token_ids, max_context=inputs.max_context, decode=inputs.decode,
    )

class Mute:
    version = 0
    def __init__(self, inputs):
        pass
    async def generate(self, token_ids, sampling):
        pass
    async def load_weights(self, source, version):
        pass
'''


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    return {
        "run_dir": str(tmp_path / "run"),
        "model": {"scratch": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}},
        "tokenizer": {"build": "chars"},
        "data": {"train": [{"path": "tests/data/words.jsonl", "limit": 4}]},
        "algorithm": {
            "loss": {"name": f"{mine}:tilted", "tilt": 0.5},
            "advantage": {"name": f"{mine}:centred", "scale": 2.0},
        },
        "rewards": {"a": {"function": f"{mine}:letters", "arguments": {"letter": "a"}}},
        "rollout": {"group_size": 2, "sampling": {"max_tokens": 4}},
        "train": {"steps": 2, "tasks_per_step": 2},
        "track": {
            "trackers": ["jsonl", f"{mine}:Lines"],
            "arguments": {f"{mine}:Lines": {"file": str(tmp_path / "lines.jsonl")}},
        },
        "machine": {"device": "cpu"},
    }


def test_a_run_of_a_users_own_parts(tree: dict[str, Any], tmp_path: Path) -> None:
    whet.train(**tree)
    (lines, kept) = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (tmp_path / "lines.jsonl", tmp_path / "run" / "metrics.jsonl")
    )
    steps = [line for line in kept if "train/loss" in line]
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2]
    assert all(line["train/tilt"] == pytest.approx(0.5) for line in steps)


def test_an_engine_of_a_users_own_samples_the_whole_run(tree: dict[str, Any], tmp_path: Path) -> None:
    whet.train(**tree, overrides=[f"rollout.engine={tmp_path}/mine.py:parrot"])
    tables = [pq.read_table(path) for path in (tmp_path / "run" / "rollouts").glob("*.parquet")]
    texts = [text for table in tables for text in table["text"].to_pylist()]
    assert len(texts) == 8
    assert all(text == text[0] * 4 for text in texts)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (
            "{folder}/mine.py:Mute",
            r"a Mute without can, score, update_weights \(formerly load_weights\), pause, .*close, generate\(request",
        ),
        (
            "vlm",
            "'vlm' is not known.*known: native, hf, vllm, sglang, openai, or your own as 'package.module:name'",
        ),
        (":vllm", "':vllm' is not known.*or your own as 'package.module:name'"),
        ("{folder}/mine.py:parott", "did you mean 'parrot'"),
    ],
)
def test_an_engine_that_is_none_is_refused_at_the_start(
    tree: dict[str, Any], tmp_path: Path, engine: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        whet.train(**tree, overrides=[f"rollout.engine={engine.format(folder=tmp_path)}"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("parrot", "rollout.env.make 'parrot': expected 'package.module:name' or 'path/to/file.py:name'"),
        (":parrot", "rollout.env.make ':parrot': expected 'package.module:name'"),
        ("mine.py:", "rollout.env.make 'mine.py:': expected 'package.module:name'"),
        ("mine.py", "expected mine.py:NAME"),
    ],
)
def test_a_name_without_its_place_is_told_what_is_missing(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_object(name, what="rollout.env.make")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.loss.tlt=3", "has no setting 'tlt'; did you mean 'tilt'"),
        ("algorithm.loss.tilt=much", r"takes float"),
        ("algorithm.loss.tokens=1", r"takes bool"),
        ("algorithm.advantage.gamma=0.5", "has no setting 'gamma'; it has: scale"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_at_the_start(
    tree: dict[str, Any], override: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        whet.train(**tree, overrides=[override])


ANNOTATED = """
from __future__ import annotations
from functools import partial
from typing import TYPE_CHECKING, Annotated
import torch
from annotated_types import Gt
from whet.batch import Loss
if TYPE_CHECKING:
    from whet.batch import Batch, ModelOutputs

def tilted(batch: Batch, out: ModelOutputs, *, tilt: float = 1.0, over: Annotated[int, Gt(2)] = 3,
           table: torch.Tensor | None = None, other: Batch | None = None) -> Loss:
    return Loss(-batch.adv_N * out.logp_N * tilt, {"tilt": batch.adv_N * 0 + tilt})

class Tilted:
    def __call__(self, batch: Batch, out: ModelOutputs, *, tilt: float = 1.0) -> Loss:
        return tilted(batch, out, tilt=tilt)

an_object = Tilted()
a_part = partial(tilted, over=4)
"""


@pytest.mark.parametrize("name", ["tilted", "an_object", "a_part"])
def test_settings_are_annotated_where_names_of_type_checkers_stand_beside_them(
    tree: dict[str, Any], tmp_path: Path, name: str
) -> None:
    mine = tmp_path / "annotated.py"
    mine.write_text(ANNOTATED)
    whet.train(**tree, overrides=[f"algorithm.loss={{name: {mine}:{name}, tilt: 0.5}}", "train.steps=1"])
    kept = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/tilt"] for line in kept if "train/loss" in line] == [pytest.approx(0.5)]
    with pytest.raises(ConfigError, match=r"algorithm\.loss\.tilt='much': .* takes float"):
        whet.train(
            **tree,
            overrides=[f"algorithm.loss={{name: {mine}:{name}, tilt: much}}", f"run_dir={tmp_path}/other"],
        )


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("over: 1", r"algorithm\.loss\.over=1: .* takes int: .*greater than 2"),
        (
            "table: [1]",
            r"algorithm\.loss\.table=\[1\]: .* which a config cannot hold\. Annotate the setting as a number",
        ),
        ("other: 1", None),
    ],
)
def test_a_setting_that_a_config_cannot_hold_is_told(
    tree: dict[str, Any], tmp_path: Path, setting: str, said: str | None
) -> None:
    mine = tmp_path / "annotated.py"
    mine.write_text(ANNOTATED)
    given = [f"algorithm.loss={{name: {mine}:tilted, {setting}}}", "train.steps=1"]
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        whet.train(**tree, overrides=given)


def test_an_importance_weight_of_a_users_own(tree: dict[str, Any], tmp_path: Path) -> None:
    whet.train(
        **tree, overrides=[f"algorithm.correction.weight={{name: {tmp_path}/mine.py:halved, factor: 0.5}}"]
    )
    kept = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["correction/weight_mean"] for line in kept if "train/loss" in line] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        ("{{name: {mine}:halved, factr: 2}}", "algorithm.correction.weight.factr: .* did you mean 'factor'"),
        ("{mine}:misshapen", r"must return one weight a token, shape \(\d+,\); got shape \(\)"),
    ],
)
def test_an_importance_weight_that_does_not_fit_is_refused(
    tree: dict[str, Any], tmp_path: Path, weight: str, said: str
) -> None:
    given = weight.format(mine=tmp_path / "mine.py")
    with pytest.raises(WhetError, match=said):
        whet.train(**tree, overrides=[f"algorithm.correction.weight={given}"])


def test_a_loss_without_a_gradient_is_refused(tree: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=r"its loss_N has no gradient: compute it from outputs.logp_N"):
        whet.train(**tree, overrides=[f"algorithm.loss={tmp_path}/mine.py:detached"])


def test_an_advantage_that_is_not_finite_is_named_at_the_first_step(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    said = r"'.*:divided' returned nan for (\d+) of \1 sampled tokens, first for rollout 0 of task 0, whose reward is"
    with pytest.raises(WhetError, match=said):
        whet.train(**tree, overrides=[f"algorithm.advantage={tmp_path}/mine.py:divided"])
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()
    other = f"run_dir={tmp_path / 'other'}"
    whet.train(**tree, overrides=[f"algorithm.advantage={tmp_path}/mine.py:unsampled", other])


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (
            "unfinished",
            r"loss '.*:unfinished' returned nan for (\d+) of \1 sampled tokens, first for rollout 0 of task 0, whose",
        ),
        ("rooted", r"the gradient of loss '.*:rooted' is (nan|inf) for \d+ of \d+ sampled tokens"),
    ],
)
def test_a_loss_that_is_not_finite_is_named_at_the_first_step(
    tree: dict[str, Any], tmp_path: Path, loss: str, said: str
) -> None:
    with pytest.raises(WhetError, match=said):
        whet.train(**tree, overrides=[f"algorithm.loss={tmp_path}/mine.py:{loss}"])
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()


def test_the_rollout_of_a_loss_that_is_not_finite_has_its_name_in_the_run(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    """It is no place in a micro-batch."""
    del tree["algorithm"]["advantage"]
    loss = f"algorithm.loss={{name: {tmp_path}/mine.py:without, uid: 1, index: 1}}"
    with pytest.raises(WhetError, match=r"first for rollout 1 of task 1, whose reward is [01]; expected"):
        whet.train(**tree, overrides=[loss, "train.micro_batch_rollouts=1"])


def test_where_nothing_is_rewarded_no_reward_is_told(tree: dict[str, Any], tmp_path: Path) -> None:
    loss = {"name": f"{tmp_path}/mine.py:without", "uid": 1, "index": 0}
    tree["algorithm"] = {"name": "sft", "loss": loss}
    for only_online in ("rewards", "rollout"):
        del tree[only_online]
    with pytest.raises(WhetError, match=r"first for rollout 0 of task 1; expected"):
        whet.train(**tree, overrides=["train.micro_batch_rollouts=1"])


def test_a_loss_is_read_where_tokens_were_sampled(tree: dict[str, Any], tmp_path: Path) -> None:
    """It may be anything elsewhere, in the first step too."""
    trained = whet.train(
        **tree, overrides=[f"algorithm.loss={tmp_path}/mine.py:only_sampled", "train.steps=1"]
    )
    assert [row["train/skipped_steps"] for row in trained.metrics if "train/loss" in row] == [0.0]


def test_another_name_inherits_no_setting(tree: dict[str, Any]) -> None:
    assert load(None, ["algorithm.loss=gspo"], tree).config.algorithm.loss == "gspo"
    assert load(None, ["algorithm.loss.tilt=2"], tree).config.algorithm.loss == {
        **tree["algorithm"]["loss"],
        "tilt": 2,
    }
    named = load(None, ["algorithm.loss={name: gspo, clip_low: 1e-3}"], tree).config.algorithm.loss
    assert named == {"name": "gspo", "clip_low": 1e-3}
