"""SkyRL's environments of one turn, and names that only a script's own code knows."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from asked import asked
from whet.config.load import Loaded
from whet.config.load import load as load_config
from whet.dialects.row import Native, NotSupportedYet, Values
from whet.dialects.skyrl import learn, run
from whet.dialects.tables import table
from whet.dialects.versions import VERSION
from whet.guard import sandbox
from whet.rewards.answer_line import aime
from whet.rewards.code import code
from whet.types import ConfigError, Json, Task

pytestmark = pytest.mark.usefixtures("home")

learn, run = map(asked, (learn, run))

HERE = Path(__file__).parent / "dialects"
A = "trainer.algorithm"


def values(given: dict[str, Json], version: str = "main") -> Values:
    return {row.key: row.default for row in table("skyrl", version)} | given | {VERSION: version}


def load(*overrides: str) -> Loaded:
    return load_config(HERE / "skyrl_gsm8k_ppo.yaml", overrides, dialect="skyrl@main")


# ---------------------------------------------------------------- environments


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("so it is\nAnswer: 34", 1.0),
        ("answer : $34$.", 1.0),
        ("ANSWER:34</s>", 1.0),
        ("Answer: $\\boxed{34}$", 1.0),
        ("Answer: x + y = 34", 1.0),
        ("Answer: 34 degrees", 1.0),
        ("Answer: 34.", 1.0),
        ("**Answer:** 34", 1.0),
        ("Answer: 68/2", 1.0),
        ("Answer: 33, no.\nAnswer: 34", 1.0),
        ("Answer: 34, no.\nAnswer: 33", -1.0),
        ("\\boxed{34}", -1.0),
        ("Answer:", -1.0),
        ("Answer: 34" + " " * 290, 1.0),
        ("Answer: 34" + " " * 293, -1.0),
    ],
)
def test_aime_judges_what_follows_the_last_answer_in_the_last_300_characters(
    reply: str, score: float
) -> None:
    """`Answer: 34` and 290 spaces are 300 characters. Of 303, the last 300 begin with `wer: 34`."""
    assert aime(reply, Task(uid=0, source="aime", prompt="?", answer="34"))["score"] == score


def test_aime_reads_the_column_of_its_answer() -> None:
    v = values(
        {"environment.env_class": "aime", "data.train_data": ["a.parquet"], "data.val_data": ["b.parquet"]}
    )
    assert run.training_data(v)["data.train.0.answer"] == "reward_model.ground_truth"
    assert run.evaluation(v)["data.eval.0.answer"] == "reward_model.ground_truth"
    assert run.environment(v) == {"rewards.aime.function": "whet.rewards.answer_line:aime"}


@pytest.mark.skipif(bool(sandbox.lacking()), reason=sandbox.lacking())
def test_lcb_runs_all_tests_of_the_last_block() -> None:
    """As skyrl-gym 0.4: 1 where all pass, else 0; the block may be marked as it likes."""
    native = run.environment(values({"environment.env_class": "lcb"}))
    assert native["rewards.lcb.function"] == "code"
    tests = [{"input": f"{n}", "output": f"{n + 1}\n", "testtype": "stdin"} for n in range(12)]
    row = Task(uid=0, source="lcb", prompt="?", answer=json.dumps(tests))
    for limit, score in ((12, 1.0), (11, 0.0)):
        reply = f"```py\nn = int(input())\nprint(n + 1 if n < {limit} else 0)\n```"
        assert asyncio.run(code(reply, row, **native["rewards.lcb.arguments"])) == {"score": score}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "searchcode",
            r"runs what the policy writes as a program.*; write an environment that does so in a sandbox",
        ),
        ("multiply", r"your own code registers.*environment\.env_class=path/to/file\.py:name"),
        (None, r"your own code registers.*environment\.env_class=path/to/file\.py:name"),
    ],
)
def test_other_environments_are_refused_with_what_to_do(name: Json, why: str) -> None:
    with pytest.raises(NotSupportedYet, match=why):
        run.environment(values({"environment.env_class": name}))


# ---------------------------------------------------------------- several turns

SEARCH: dict[str, Json] = {
    "environment.env_class": "search", "generator.max_turns": 4, "generator.max_input_length": 900,
    "environment.skyrl_gym.*": {"search": {"topk": 3, "search_url": "http://there"}, "text2sql": {"db_path": "sql"}},
}  # fmt: skip


def env(given: dict[str, Json], version: str = "main") -> Native:
    made = run.environment(values({**SEARCH, **given}, version))
    return {key.removeprefix("rollout.env."): value for key, value in made.items()}


def test_an_environment_of_skyrl_gym_is_played_by_its_own_code() -> None:
    assert env({}) == {
        "make": "whet.envs.skyrl_gym:make",
        "arguments": {"env": "search", "max_turns": 4, "topk": 3, "search_url": "http://there"},
        "max_turns": 4, "max_tokens_per": "turn", "input_tokens": 900, "observation_tokens": 900, "history": "append",
    }  # fmt: skip
    once = env(
        {"environment.env_class": "text2sql", "generator.max_turns": 1, "generator.max_input_length": 512}
    )
    assert once["arguments"] == {"env": "text2sql", "max_turns": 1, "db_path": "sql"}
    mine = env({"environment.env_class": "games.py:Game"})
    assert mine["arguments"] == {"env": "games.py:Game", "max_turns": 4}
    over = run.environment(values({**SEARCH, "environment.env_class": "gsm8k"}))
    assert over == {"rewards.gsm8k.function": "whet.rewards.gsm8k:gsm8k"}, "it ends after one reply"


def test_how_turns_follow_each_other() -> None:
    template, kept, raw = (
        "generator.chat_template.name_or_path",
        "qwen3_with_thinking",
        "use_conversation_multi_turn",
    )
    assert env({template: kept})["history"] == "append"
    assert env({template: "qwen3_without_thinking"})["history"] == "template"
    assert env({f"generator.{raw}": False, template: "qwen3_without_thinking"})["history"] == "inline"
    assert env({}, "doc")["history"] == "inline", "the document's default"
    assert env({"generator.step_wise_trajectories": True})["history"] == "template"
    assert run.chat_template(values({template: kept})) == {}
    stop: dict[str, Json] = {"generator.sampling_params.stop": ["</answer>"]}
    assert env(stop)["history"] == "append"
    unclosed = {"generator.append_eos_token_after_stop_str_in_multi_turn": False}
    with pytest.raises(ConfigError, match="closed as the chat template closes it"):
        env({**stop, **unclosed})
    assert env(unclosed)["history"] == "append", "without stop texts nothing reads it"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({f"{A}.loss_reduction": "sequence_mean"}, "trains every turn as a sequence of its own"),
        ({f"{A}.advantage_estimator": "gae"}, "without a critic alone"),
        (
            {"generator.use_conversation_multi_turn": False},
            r"needs generator\.use_conversation_multi_turn=true",
        ),
    ],
)
def test_turns_as_sequences_of_their_own(given: dict[str, Json], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        env({"generator.step_wise_trajectories": True, **given})


def test_the_longest_input_holds_the_prompt() -> None:
    with pytest.raises(ConfigError, match=r"must be at least trainer\.max_prompt_length=512"):
        env({"generator.max_input_length": 400})
    with pytest.raises(NotSupportedYet, match="the penalty is one of replies of one turn"):
        env({f"{A}.overlong_buffer_len": 16})


# ---------------------------------------------------------------- registered names

ADVANTAGE = "def centred(batch, *, reward_N):\n    return reward_N - reward_N.mean(), None\n"
LOSS = """
from whet.algos.losses import LOSSES


def plain(batch, outputs):
    return LOSSES["reinforce"](batch, outputs)
"""


def test_a_registered_estimator_or_loss_is_refused_with_what_to_write() -> None:
    for key in ("advantage_estimator", "policy_loss_type"):
        with pytest.raises(ConfigError, match=r'got "mine", .*path/to/file\.py:name') as e:
            load(f"{A}.{key}=mine")
        assert "a name that your own code registers is not known here" in str(e.value)


def test_a_function_stands_in_place_of_a_registered_name(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(ADVANTAGE + LOSS)
    cfg = load(f"{A}.advantage_estimator={file}:centred", f"{A}.policy_loss_type={file}:plain").config
    assert (cfg.algorithm.advantage, cfg.algorithm.loss) == (f"{file}:centred", f"{file}:plain")


# ---------------------------------------------------------------- on-policy distillation

TEACHER: dict[str, Json] = {
    f"{A}.advantage_estimator": "no_op",
    f"{A}.use_kl_in_reward": True,
    f"{A}.use_kl_loss": False,
    "trainer.ref.model.path": "teacher",
}


def test_no_op_is_on_policy_distillation() -> None:
    """Of SkyRL's example: the reward of a token is -(log policy - log teacher), and no_op takes it as the advantage."""
    v = values(TEACHER)
    assert learn.advantages(v) == {"algorithm.name": "distill"}
    assert learn.reference(v) == {"reference.path": "teacher"}
    assert learn.kl(v) == {}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({f"{A}.use_kl_in_reward": False}, "use_kl_in_reward=true"),
        ({"trainer.ref.model.path": None}, "is the teacher"),
    ],
)
def test_distillation_needs_its_teacher(change: dict[str, Json], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        learn.advantages(values(TEACHER | change))


# ---------------------------------------------------------------- vLLM's options


def test_quantization_of_the_engine_is_translated_and_what_changes_no_number_accepted() -> None:
    at = "generator.engine_init_kwargs"
    harmless = (
        f"{at}.gdn_prefill_backend=triton",
        f"{at}.language_model_only=true",
        f"{at}.chat_template=a.jinja",
    )
    assert load(*harmless).config == load().config
    assert load(f"{at}.quantization=fp8").config.rollout.quantization == "float8"
