"""Loading: what a file means, where each value came from, and every way in which it can be wrong."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from whet.config import interpolate
from whet.config import keys as schema_keys
from whet.config.derived import with_lr
from whet.config.faults import faults
from whet.config.keys import FOREIGN, did_you_mean, distance, dotted, keys, lookup, suggest
from whet.config.load import load, stage_configs
from whet.config.parse import as_yaml, parse
from whet.config.scalars import scalar
from whet.config.schema import Config
from whet.config.tree import leaves, merge
from whet.types import ConfigError


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refused(*args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*args, **kwargs)
    return str(caught.value)


# ---------------------------------------------------------------- YAML by the core rules of 1.2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-2.", -2.0),
        ("8", 8),
        ("0o10", 8),
        ("0x1F", 31),
        ("+3", 3),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("off", "off"),
        ("yes", "yes"),
        ("NO", "NO"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("-.inf", -math.inf),
        ("e5", "e5"),
        (".", "."),
    ],
)
def test_unquoted_scalars(text, value):
    found = scalar(text)
    assert found == value
    assert type(found) is type(value)


def test_a_number_that_begins_with_0_is_refused():
    for text in ("010", "-08", "00"):
        (problem,) = parse(f"a: {text}").problems
        assert f"a: {text} begins with 0" in problem[1]
    assert parse("a: '010'\nb: 010.5").tree == {"a": "010", "b": 10.5}


def test_quoted_scalars_are_text():
    assert parse("a: '8'\nb: \"true\"\nc: |\n  9\n").tree == {"a": "8", "b": "true", "c": "9\n"}


TEXT = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=8)


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | TEXT
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(TREES)
def test_json_is_read_as_json(value):
    assert parse(json.dumps(value)).tree == (value if value != {} else {})


LIKE_NUMBERS = st.from_regex(r"[-+.0-9eExXobn_:~<]{1,6}", fullmatch=True)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(LIKE_NUMBERS | TEXT, TREES | LIKE_NUMBERS, max_size=3))
@example({"name": "1e3", "1e3": "0o17", "<<": "99999999999999999999", "": "~", "text": "a: b #c\nd"})
def test_what_is_written_is_read_as_it_was(tree):
    assert parse(as_yaml(tree)).tree == tree


def test_duplicate_keys_are_refused_with_both_lines(tmp_path):
    path = write(tmp_path, "seed: 1\ntrain:\n  steps: 2\n  update_epochs: 1\n  steps: 3\nseed: 2\n")
    said = refused(path)
    assert f"{path}:5: train.steps: given twice, in lines 3 and 5" in said
    assert f"{path}:6: seed: given twice, in lines 1 and 6" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1, 2\nb: 3\n", "not valid YAML"),
        ("- 1\n- 2\n", "a config is a mapping of keys, got [1, 2]"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("seed: !!python/object/apply:os.getcwd []\n", "YAML tags (!...) are not supported"),
        ("seed: !!str 8\n", "YAML tags (!...) are not supported"),
        ("train: &t\n  steps: *t\n", "contains itself"),
        ("train:\n  <<: [3]\n", "train.<<: expected an alias of a mapping (*name), or a list of them"),
        ("train: &t\n  <<: *t\n", "contains itself"),
        ("? [a, b]\n: 1\n", "a key must be text"),
        ("train:\n\tsteps: 3\n", "not valid YAML"),
    ],
)
def test_yaml_that_is_refused(tmp_path, text, said):
    assert said in refused(write(tmp_path, text))


def test_aliases_that_multiply_are_stopped():
    text = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
    )
    parsed = parse(text)
    assert parsed.tree is None
    assert "is an alias inside an alias" in parsed.problems[0][1]


def test_an_alias_is_its_anchor(tmp_path):
    path = write(tmp_path, "train: {optimizer: &o {lr: 0.5}}\ncritic: {optimizer: *o}\n")
    assert load(path).config.critic.optimizer.lr == 0.5


def test_merged_mappings_count_below_what_stands_beside_them(tmp_path):
    text = """
train: {optimizer: &first {lr: 0.5, betas: [0.1, 0.2]}}
critic:
  optimizer: &second {lr: 0.25, eps: 1.0e-3}
stages:
- name: one
  critic: {optimizer: {<<: [*first, *second], betas: [0.3, 0.4]}}
- name: two
  critic: {optimizer: {betas: [0.3, 0.4], <<: *second}}
"""
    loaded = load(write(tmp_path, text))
    one, two = (stage.critic.optimizer for stage in loaded.stages)
    assert (one.lr, one.betas, one.eps) == (0.5, (0.3, 0.4), 1e-3)  # the first mapping is on top
    assert (two.lr, two.betas, two.eps) == (0.25, (0.3, 0.4), 1e-3)
    wrong = text.replace("eps: 1.0e-3", "epss: 1.0e-3")
    assert "4: critic.optimizer.epss" in refused(write(tmp_path, wrong))  # at the line where it stands
    assert parse('a: {"<<": 1}').tree == {"a": {"<<": 1}}


# ---------------------------------------------------------------- what a file means


def test_an_empty_file_is_all_defaults(tmp_path):
    loaded = load(write(tmp_path, ""))
    assert loaded.config.model_copy(update={"run_dir": "runs/${name}"}) == Config()
    assert loaded.config.run_dir == "runs/run"
    assert loaded.names == ("main",)
    assert loaded.stages == (with_lr(loaded.config),)


def test_values_and_lines(tmp_path):
    path = write(
        tmp_path,
        "name: a\n"
        "train:\n"
        "  steps: 5\n"
        "  optimizer: {lr: 1e-6}\n"
        "data:\n"
        "  train:\n"
        "    - path: x.parquet\n"
        "    - {path: y.parquet,\n"
        "       limit: 3}\n"
        "machine: {logprob_parity: off}\n",
    )
    loaded = load(path)
    cfg = loaded.config
    assert cfg.train.optimizer.lr == 1e-6
    assert cfg.machine.logprob_parity == "off"
    assert cfg.data.train[1].limit == 3
    assert cfg.run_dir == "runs/a"
    assert loaded.where("train.optimizer.lr") == f"{path}:4"
    assert loaded.where("data.train[1].limit") == f"{path}:9"
    assert loaded.where("data.train.1.limit") == f"{path}:9"
    assert loaded.where("train.update_epochs") == f"{path}:2", "the section of a key that is not given"
    assert loaded.where("eval.interval") == ""


def test_toml_says_the_same_as_yaml(tmp_path):
    toml = write(
        tmp_path,
        'name = "a"\n\n[train]\nsteps = 5\noptimizer.lr = 1e-6\n\n[[data.train]]\npath = "x"\n'
        '\n[[data.train]]\npath = "y"\n[data.train.arguments]\ntask = "t"\n',
        "run.toml",
    )
    loaded = load(toml)
    values = {
        "name": "a",
        "train": {"steps": 5, "optimizer": {"lr": 1e-6}},
        "data": {"train": [{"path": "x"}, {"path": "y", "arguments": {"task": "t"}}]},
    }
    assert loaded.config == load(None, values=values).config
    assert loaded.where("train.optimizer.lr") == f"{toml}:5"
    assert loaded.where("data.train[1].path") == f"{toml}:11"
    assert loaded.where("data.train[1].arguments.task") == f"{toml}:13"


def test_toml_errors_have_lines(tmp_path):
    path = write(tmp_path, "name = 'a'\n[train]\nstesp = 3\n", "run.toml")
    assert f"{path}:3: train.stesp: unknown key; did you mean train.steps?" in refused(path)
    path = write(tmp_path, "name = 'a'\nname = 'b'\n", "run.toml")
    assert f"{path}:2: not valid TOML" in refused(path)


def test_files_that_are_not_there_or_not_configs(tmp_path):
    assert "cannot be read: No such file" in refused(tmp_path / "none.yaml")
    assert "a config file ends in .yaml" in refused(write(tmp_path, "", "run.py"))


# ---------------------------------------------------------------- overrides


def test_overrides_reach_everything(tmp_path):
    path = write(
        tmp_path,
        "data: {eval: [{path: a}, {path: b, limit: 5}]}\n"
        "stages:\n  - {name: sft, train: {steps: 1, update_epochs: 2}}\n  - {name: rl}\n",
    )
    loaded = load(
        path,
        [
            "train.optimizer.lr=2e-5",
            "data.eval.0.limit=10",
            "data.eval[1].limit=",
            "stages.sft.train.steps=7",
            "stages.1.eval.interval=3",
            "data.train=[{path: c, system_prompt: 'a=b'}]",
            "rewards.acc={function: exact}",
            "rewards.acc.arguments.deep.er=[1, 2]",
            "rollout.sampling.stop=['###', \"8\"]",
        ],
    )
    cfg = loaded.config
    assert cfg.train.optimizer.lr == 2e-5
    assert [s.limit for s in cfg.data.eval] == [10, None]
    assert [s.path for s in cfg.data.eval] == ["a", "b"], "the rest of an entry stays"
    assert loaded.stages[0].train.steps == 7
    assert loaded.stages[0].train.update_epochs == 2
    assert loaded.stages[1].eval.interval == 3
    assert cfg.data.train[0].system_prompt == "a=b", "only the first = parts key and value"
    assert cfg.rewards["acc"].arguments == {"deep": {"er": [1, 2]}}
    assert cfg.rollout.sampling.stop == ("###", "8")
    assert loaded.where("train.optimizer.lr") == "override train.optimizer.lr=2e-5"
    assert loaded.where("data.eval.1.path") == f"{path}:1"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ('"End with #### N"', "End with #### N"),
        ("'#### N' # comment", "#### N"),
        ("a#b", "a#b"),
        ("|\n  #### N\n  b", "#### N\nb"),
        ('"a\\nb"', "a\nb"),
    ],
)
def test_overrides_of_quoted_text_are_taken_whole(value: str, text: str) -> None:
    assert (
        load(None, ["data.train=[{path: a}]", f"data.train.0.system_prompt={value}"])
        .config.data.train[0]
        .system_prompt
        == text
    )


def test_the_last_word_counts(tmp_path):
    path = write(tmp_path, "seed: 1\ntrain: {steps: 1, update_epochs: 4}\n")
    loaded = load(path, ["seed=3", "seed=4"], {"seed": 2, "train": {"steps": 2}})
    assert (loaded.config.seed, loaded.config.train.steps, loaded.config.train.update_epochs) == (4, 2, 4)
    assert loaded.where("train.steps") == "values"
    assert loaded.where("train.update_epochs") == f"{path}:2"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.steps", "expected key.path=value"),
        ("+train.steps=3", "expected key.path=value"),
        ("--train.steps=3", "expected key.path=value"),
        ("=3", "expected key.path=value"),
        ("train.stesp=3", "unknown key; did you mean train.steps?"),
        ("lr=3", "did you mean train.optimizer.lr or critic.optimizer.lr?"),
        ("actor_rollout_ref.rollout.n=4", "it is a key of verl, and becomes rollout.group_size"),
        ("data.eval.1.limit=3", "data.eval has 1 entries, counted from 0: no entry 1"),
        ("data.train.0.limit=3", "data.train has no entries"),
        ("stages.rl.train.steps=3", "no stage 'rl'; stages: sft"),
        ("stages.sft.model.path=x", "model cannot differ between stages"),
        ("train.steps=[1", "not valid YAML"),
        ("train.steps=3.5", "train.steps: got 3.5, expected a whole number >= 0"),
        ("seed.x=3", "unknown key"),
        (
            "data.eval.0.system_prompt=End with #### and a number",
            "in YAML a comment begins at #; if it is text, quote",
        ),
        ("data.eval.0.system_prompt=#### and a number", "in YAML a comment begins at #"),
        ("run_dir=runs/a\nb", "in YAML the lines are joined"),
        ("seed=3 # again", "in YAML a comment begins at #"),
    ],
)
def test_overrides_that_are_refused(tmp_path, override, said):
    path = write(tmp_path, "data: {eval: [{path: a}]}\nstages: [{name: sft}]\n")
    message = refused(path, [override])
    assert f"override {override}: " in message
    assert said in message


def test_values_are_plain():
    loaded = load(None, values={"data": {"train": ({"path": (Path("a"), "b")},)}})
    assert loaded.config.data.train[0].path == ("a", "b")
    with pytest.raises(ConfigError, match=r"train\.steps: got a set"):
        load(None, values={"train": {"steps": {1}}})


# ---------------------------------------------------------------- references


def test_references(tmp_path, monkeypatch):
    monkeypatch.setenv("WHET_TEST_STEPS", "12")
    path = write(
        tmp_path,
        "name: x\n"
        "eval: {interval: '${train.tasks_per_step}'}\n"  # a default
        "train: {steps: '${oc.decode:${oc.env:WHET_TEST_STEPS}}', optimizer: {lr: 2e-6}}\n"
        "model: {path: '${oc.env:WHET_TEST_NONE,models/m}'}\n"
        "critic: {optimizer: '${train.optimizer}'}\n"
        "rewards: {r: {function: f, arguments: {text: 'cost \\${x}'}}}\n",
    )
    cfg = load(path, ["name=y"]).config
    assert cfg.eval.interval == 16
    assert cfg.train.steps == 12
    assert cfg.model.path == "models/m"
    assert cfg.run_dir == "runs/y"
    assert cfg.critic.optimizer.model_dump() == cfg.train.optimizer.model_dump()
    assert cfg.rewards["r"].arguments == {"text": "cost ${x}"}


def test_a_home_folder_is_meant_by_a_tilde(tmp_path, monkeypatch):
    """A YAML file and an override in most shells bring it as it is; a folder of that name was made."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write(
        tmp_path,
        "name: x\n"
        "run_dir: ~/runs/${name}\n"
        "dirs: {checkpoints: ~/large}\n"
        "checkpoint: {resume: ~/runs/y/checkpoints/0-main-000001, upload_to: ['file:///~/up']}\n",
    )
    cfg = load(path, ()).config
    assert cfg.run_dir == f"{tmp_path}/runs/x"
    assert cfg.dirs == {"checkpoints": f"{tmp_path}/large"}
    assert cfg.checkpoint.resume == f"{tmp_path}/runs/y/checkpoints/0-main-000001"
    assert cfg.checkpoint.upload_to == ("file:///~/up",)


@pytest.mark.parametrize(
    "text",
    [
        "${a}", "${b.refers}", "x/${a}/${b.deep}", "~/${b.refers}", "${n}-${a}", "${a}\\\\", "\\${a}",
        "${list}", "${list[1]}", "${b}", "${empty}",
        *(f"${{oc.select:{key},null}}" for key in ("a", "b.deep", "b.none", "none.none", "n.none", "list", "b")),
        "${oc.select:b.none,3}",
    ],
)  # fmt: skip
def test_a_reference_means_what_it_means_to_omegaconf(text):
    tree = {"a": "plain", "n": None, "list": [1, "x", {"y": 2.5}], "empty": {}, "text": text}
    tree["b"] = {"deep": "deep", "refers": "${a}"}
    config = interpolate.OmegaConf
    assert interpolate.interpolate(tree, {}) == (config.to_container(config.create(tree), resolve=True), {})


def test_references_lead_through_sections_and_no_other_is_read(monkeypatch):
    """OmegaConf takes long to read; what it is not given stays as it was written."""
    monkeypatch.setenv("WORD", "from outside")
    tree = {"a": "${b.c}", "b": {"c": "${d.e[1]}/${oc.env:WORD}", "u": 1}, "z": {"n": None, "l": [1.5, True]}}
    defaults = {"d": {"e": ["x", "${f}"]}, "f": "${g}", "g": 7, "y": {"left": "out"}}
    given, create = [], interpolate.OmegaConf.create
    monkeypatch.setattr(interpolate.OmegaConf, "create", lambda tree: given.append(tree) or create(tree))
    expected = {"a": "7/from outside", "b": {"c": "7/from outside", "u": 1}, "z": tree["z"]}
    assert interpolate.interpolate(tree, defaults) == (expected, {})
    assert given[-1].keys() == {"a", "b", "d", "f", "g"}
    for nested in ("${y.${k}}", "${.k}", "${oc.select:.y.left}"):  # OmegaConf alone knows where these lead
        found, wrong = interpolate.interpolate({"a": nested, "k": "left", "z": 1}, defaults)
        assert (found["a"], wrong) == ("out" if "y" in nested else "left", {})
        assert given[-1].keys() == {"a", "k", "z", *defaults}
    for chosen, value in (
        ("y.left", "out"),
        ("y.left,null", "out"),
        ("y.right,null", None),
        ("x,7", 7),
        ("f,8", 7),
    ):
        found, wrong = interpolate.interpolate({"a": f"${{oc.select:{chosen}}}", "z": 1}, defaults)
        assert (found["a"], wrong) == (value, {})
        assert given[-1].keys() == {"a", *{"y": "y", "x": "", "f": "fg"}[chosen[0]]}
    for said in ("${nowhere.x}", "???"):
        found, wrong = interpolate.interpolate({"b": {"c": said}, "z": 1}, defaults)
        assert (found, wrong.keys()) == ({"b": {"c": None}, "z": 1}, {("b", "c")})


def test_defaults_referred_to_do_not_count_as_set(tmp_path):
    cfg = load(write(tmp_path, "eval: {interval: '${train.tasks_per_step}'}\n")).config
    assert cfg.model_fields_set == {"eval", "run_dir"}
    assert cfg.eval.model_fields_set == {"interval"}


def test_references_that_fail_are_all_told(tmp_path):
    path = write(
        tmp_path,
        "name: '${nope.x}'\nseed: '${oc.env:WHET_TEST_NONE}'\nrun_dir: 'a${b'\n"
        "train: {steps: '???'}\nmodel: {path: 3}\n",
    )
    said = refused(path)
    for line, text in [
        (1, 'name: "${nope.x}": Interpolation key'),
        (2, "WHET_TEST_NONE"),
        (3, 'run_dir: "a${b"'),
        (4, 'train.steps: "???": must be given'),
        (5, "model.path: got 3"),
    ]:
        assert f"{path}:{line}: " in said
        assert text in said
    assert said.startswith("5 problems in")


# ---------------------------------------------------------------- stages


def test_stages_are_merged_over_the_base(tmp_path):
    path = write(
        tmp_path,
        "train: {steps: 5, optimizer: {lr: 0.1, betas: [0.5, 0.6]}}\n"
        "data: {train: [{path: a}, {path: b}]}\n"
        "algorithm: {name: grpo, loss: {clip_high: 0.3}, kl: {coef: 0.1}}\n"
        "stages:\n"
        "  - name: sft\n"
        "    algorithm: {name: sft}\n"
        "    train: {optimizer: {betas: [0.7, 0.8]}}\n"
        "    data: {train: [{path: c}]}\n"
        "  - name: rl\n"
        "    algorithm: {loss: {clip_low: 0.1}}\n",
    )
    loaded = load(path)
    sft, rl = loaded.stages
    assert loaded.names == ("sft", "rl")
    assert sft.train.optimizer.lr == rl.train.optimizer.lr == 0.1
    assert sft.train.optimizer.betas == (0.7, 0.8)
    assert [s.path for s in sft.data.train] == ["c"], "lists are replaced"
    assert [s.path for s in rl.data.train] == ["a", "b"]
    assert sft.algorithm == load(None, values={"algorithm": {"name": "sft"}}).config.algorithm
    assert (rl.algorithm.loss, rl.algorithm.kl.coef) == ({"clip_low": 0.1, "clip_high": 0.3}, 0.1)
    assert sft.stages == rl.stages == ()
    assert stage_configs(loaded.config) == loaded.stages
    assert loaded.where("stages.rl.train.steps") == f"{path}:1", "inherited: the base's line"
    assert loaded.where("stages.sft.train.optimizer.betas") == f"{path}:7"


def test_faults_in_a_stage_name_it_and_base_faults_are_told_once(tmp_path):
    path = write(
        tmp_path,
        "seed: -1\nstages:\n  - {name: a}\n  - name: b\n    train: {steps: '5'}\n"
        "  - {name: c, eval: {reward: 3}}\n",
    )
    said = refused(path)
    assert said.count("seed") == 1
    assert f"{path}:5: stages[1] ('b').train.steps: got \"5\"" in said
    assert f"{path}:6: stages[2] ('c').eval.reward" in said
    assert said.startswith("3 problems")


def test_what_a_stage_has_from_the_base_is_told_where_the_base_has_it(tmp_path: Path) -> None:
    """Also where the stage has a section of that name; but a list of the stage is its own."""
    path = write(
        tmp_path,
        "data: {max_prompt_tokens: 8, train: [{path: a, limit: 2}]}\n"
        "stages:\n"
        "  - name: own\n"
        "    algorithm: {kl: {coef: 0.1}}\n"
        "    data: {train: [{path: b}]}\n"
        "  - name: inherited\n"
        "    data: {seed: 5}\n",
    )
    given = "algorithm.kl.estimator=k1", "data.train.0.prompt=text"
    loaded = load(path, given)
    for stage in ("own", "inherited"):
        assert loaded.where(f"stages.{stage}.algorithm.kl.estimator") == f"override {given[0]}"
        assert loaded.where(f"stages.{stage}.data.max_prompt_tokens") == f"{path}:1"
    assert loaded.where("stages.own.algorithm.kl.coef") == f"{path}:4"
    assert loaded.where("stages.own.data.train.0.limit") == f"{path}:5"
    assert loaded.where("stages.own.data.train.0.prompt") == f"{path}:5"
    assert loaded.where("stages.inherited.data.train.0.limit") == f"{path}:1"
    assert loaded.where("stages.inherited.data.train.0.prompt") == f"override {given[1]}"


def test_stages_of_a_config_made_in_python():
    cfg = Config.model_validate_json('{"stages": [{"name": "a", "train": {"stesp": 1}}]}')
    with pytest.raises(
        ConfigError, match=r"stages\[0\] \('a'\)\.train\.stesp: unknown key; did you mean train\.steps"
    ):
        stage_configs(cfg)


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            'train: {steps: "8"}',
            'train.steps: got "8", expected a whole number >= 0 or null (training steps); the value is '
            "text: write 8 without quotes",
        ),
        (
            "train: {steps: 1e3}",
            "got 1000.0, expected a whole number >= 0 or null (training steps); write 1000",
        ),
        ("train: {steps: 1_000}", 'got "1_000"'),
        ("train: {steps: -1}", "got -1, expected a whole number >= 0"),
        ("train: {steps: true}", "got true, expected a whole number"),
        ("train: {optimizer: {lr: .inf}}", "train.optimizer.lr: got Infinity, expected a number >= 0"),
        (
            "rewards: {a: {function: exact, arguments: {x: [1, .inf]}}}",
            "rewards.a.arguments.x[1]: got Infinity: a config is also kept as JSON",
        ),
        (
            "stages: [{name: a, rewards: {a: {function: exact, arguments: {x: .nan}}}}]",
            "stages[0] ('a').rewards.a.arguments.x: got NaN: a config is also kept as JSON",
        ),
        (
            "train: {optimizer: {betas: [0.9]}}",
            "train.optimizer.betas: got [0.9], expected a list of 2 (each: a number",
        ),
        ("train: {optimizer: 3}", "train.optimizer: got 3, expected a section (keys: lr, "),
        ("train: 3", "train: got 3, expected a section"),
        ("reward_workers: {env: {A: 1}}", "reward_workers.env.A: got 1, expected text"),
        ("train: {trainable: {lm_head: 3}}", "train.trainable.lm_head: got 3, expected true or false"),
        ("train: {trainable: 3}", "train.trainable: got 3, expected names, each with true or false"),
        ("eval: {reward: {a: x}}", "eval.reward: got"),
        ("track: {arguments: {wandb: 3}}", "track.arguments.wandb: got 3, expected a section of any keys"),
        (
            "eval: {at_start: yes}",
            'eval.at_start: got "yes", expected true or false (evaluate before the first step); '
            "write true without quotes",
        ),
        (
            "machine: {logprob_parity: true}",
            "machine.logprob_parity: got true, expected 'auto', 'on' or 'off'",
        ),
        (
            "rollout: {schedule: asynk}",
            "expected 'deterministic' or 'async' (deterministic: the step alone determines which weights sample which "
            "task, so the run is the same on every machine, after every resume and with explorers in separate "
            "processes; a step waits for its slowest rollout); did you mean 'async'?",
        ),
        ("rollout: {sampling: {stop: '#'}}", 'write a list: ["#"]'),
        (
            "data: {train: [{path: 5}]}",
            "data.train[0].path: got 5, expected text or a list (each: text) or null",
        ),
        ("seed: null", "seed: got null"),
        ("stages: [{train: {steps: 3}}]", "stages[0].name: must be given: text (label of the stage"),
        ("train.steps: 3", "train.steps: unknown key; a key in a file cannot contain dots"),
        (
            "model: {scratch: qwen3, trust_remote_code: true}",
            "model.trust_remote_code: unknown key: code in the folder of a model is never run",
        ),
    ],
)
def test_messages(tmp_path, line, said):
    path = write(tmp_path, f"name: x\n{line}\n")
    message = refused(path)
    assert f"{path}:2: " in message
    assert said in message
    assert message.startswith("1 problem in")


def test_all_problems_stand_in_one_message_in_the_order_of_the_lines(tmp_path):
    path = write(tmp_path, "sed: 1\ntrain: {stesp: 2, update_epochs: x}\nlr: 3\nreward_workers: {cound: 1}\n")
    lines = refused(path, ["foo=1"]).splitlines()
    assert lines[0] == f"6 problems in {path}:"
    assert [line.split(": ")[0].strip() for line in lines[1:]] == [
        f"{path}:1",
        f"{path}:2",
        f"{path}:2",
        f"{path}:3",
        f"{path}:4",
        "override foo=1",
    ]


def test_faults_of_sections_and_of_the_settings_of_functions_are_told_together(tmp_path):
    """Settings are judged by the function that is named: only right sections were asked for theirs."""
    path = write(
        tmp_path,
        "sed: 1\nalgorithm:\n  loss: {name: ppo, clip_lo: 1}\n  advantage: grop\n"
        "stages:\n  - {name: a}\n  - name: b\n    data: {order: {name: shuffled, seeed: 1}}\n"
        "    algorithm: {advantage: {name: grpo, std_ddof: x}}\n",
    )
    lines = refused(path).splitlines()
    assert lines[0].startswith("5 problems"), lines
    for line, key in (
        (1, "sed"),
        (3, "algorithm.loss.clip_lo"),
        (4, "algorithm.advantage"),
        (8, "stages[1] ('b').data.order"),
        (9, "stages[1] ('b').algorithm.advantage.std_ddof"),
    ):
        assert any(said.strip().startswith(f"{path}:{line}: {key}") for said in lines), (key, lines)


# ---------------------------------------------------------------- near misses


def test_suggestions():
    assert suggest(("lr",)) == ["train.optimizer.lr", "critic.optimizer.lr"]
    assert suggest(("temperature",))[0] == "rollout.sampling.temperature"
    assert suggest(("reward",)) == ["rewards"], "the same section first"
    assert suggest(("train", "learning_rate")) == ["train.optimizer.lr"]
    assert suggest(("stages", 1, "train", "stesp")) == ["stages[1].train.steps"]
    assert suggest(("algorithm", "clip_low")) == ["algorithm.loss.clip_low"], "where a function reads it"
    assert suggest(("algorithm", "tau")) == ["algorithm.loss.tau", "algorithm.advantage.tau"]
    assert suggest(("zzzzzz",)) == []
    assert "known here: " in did_you_mean(("zzzzzz",))


def test_names_of_other_frameworks_lead_to_keys():
    for name, target in FOREIGN.items():
        assert lookup(target.split(".")), f"{name} -> {target}"


def test_every_typo_of_distance_one_is_refused_with_the_right_key():
    """Delete, insert, replace or swap one letter of every key: the right one is among the suggestions."""
    draw = random.Random(0)
    missed = []
    for path in keys():
        name = path[-1]
        if name == "*" or len(name) < 3:
            continue
        n = draw.randrange(len(name) - 1)
        typos = [name[:n] + name[n + 1 :], name[:n] + "q" + name[n:], name[:n] + "q" + name[n + 1 :]]
        typos.append(name[:n] + name[n + 1] + name[n] + name[n + 2 :])
        for typo in typos:
            wrong = (*path[:-1], typo)
            if lookup(wrong) is None and dotted(path) not in suggest(wrong):
                missed.append((dotted(path), typo, suggest(wrong)))
    assert missed == []


def test_two_typos_in_a_longer_key():
    draw = random.Random(1)
    asked, right = 0, 0
    for path in keys():
        name = path[-1]
        if len(name) < 6:
            continue
        a, b = sorted(draw.sample(range(len(name)), 2))
        typo = name[:a] + "q" + name[a + 1 : b] + name[b + 1 :]
        asked += 1
        right += dotted(path) in suggest((*path[:-1], typo))
    assert right >= 0.99 * asked, "upload without two of its letters may be load"
    assert asked > 80


def test_every_unknown_key_is_refused_wherever_it_stands():
    """A wrong key beside every key of the schema, at any depth: never accepted."""
    for path in keys():
        if path[-1] == "*" or path[0] == "stages":
            continue
        tree: object = 1
        for part in reversed((*path[:-1], "zzz")):
            listed = part == "*" and (path[0] == "data" or {"reject", "models"} & {*path})
            tree = [tree] if listed else {"n" if part == "*" else part: tree}
        assert "unknown key" in refused(None, values=tree)


@settings(max_examples=100, deadline=None)
@given(st.text("abcd", max_size=5), st.text("abcd", max_size=5))
def test_distance_against_the_recursive_definition(a, b):
    def slow(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        best = min(slow(i - 1, j) + 1, slow(i, j - 1) + 1, slow(i - 1, j - 1) + (a[i - 1] != b[j - 1]))
        if i > 1 and j > 1 and a[i - 1] == b[j - 2] and a[i - 2] == b[j - 1]:
            best = min(best, slow(i - 2, j - 2) + 1)
        return best

    if abs(len(a) - len(b)) <= 2:
        assert distance(a, b) == slow(len(a), len(b))


# ---------------------------------------------------------------- laws


def test_a_config_written_out_loads_to_itself(tmp_path):
    first = load(Path(__file__).parent.parent / "examples" / "first_run.yaml").config
    path = write(tmp_path, json.dumps(first.model_dump(mode="json", exclude_unset=True)), "run.json")
    assert load(path).config == first


@settings(max_examples=50, deadline=None)
@given(
    *[
        st.dictionaries(
            st.sampled_from("ab"), st.integers() | st.dictionaries(st.sampled_from("ab"), st.integers())
        )
    ]
    * 3
)
def test_merge_is_associative_and_keeps_its_inputs(a, b, c):
    before = json.dumps([a, b, c])
    once, twice = merge(merge(a, b), c), merge(a, merge(b, c))
    assert before == json.dumps([a, b, c])
    for path, value in leaves(c):
        if path and value != {}:
            assert dict(leaves(once))[path] == value
    if all(isinstance(v, int) for d in (a, b, c) for v in d.values()):
        assert once == twice


def test_every_default_of_the_schema_is_valid_when_written_out():
    tree = Config().model_dump(mode="json")
    tree["run_dir"] = "runs/run"
    assert load(None, values=tree).config.model_dump() == load(None).config.model_dump()


def test_faults_need_no_file():
    from pydantic import ValidationError

    with pytest.raises(ValidationError) as caught:
        Config.model_validate_json('{"seed": "x"}')
    assert [f.path for f in faults({"seed": "x"}, caught.value)] == [("seed",)]


def test_words_exist_for_every_type_of_the_schema():
    for key in schema_keys.keys().values():
        assert key.words, key.path
        assert key.description, f"{dotted(key.path)} has no docstring"


def test_the_loader_needs_no_torch():
    code = "import sys, whet.config.load, whet.config.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
