"""The frame of the dialects: a foreign file read, translated, refused, converted; on a small table, then on all."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from whet import cli
from whet.config.load import load
from whet.config.parse import parse
from whet.config.plan import plans
from whet.dialects import row as table_rows
from whet.dialects import tables, versions
from whet.dialects.convert import native_yaml, scalar
from whet.dialects.kinds import same
from whet.dialects.match import suggest
from whet.dialects.recognise import recognise
from whet.dialects.report import counts, markdown, summary
from whet.dialects.row import Row
from whet.dialects.style import overridden
from whet.dialects.tables import TABLES, Dialect
from whet.dialects.translate import translate
from whet.types import ConfigError

pytestmark = pytest.mark.usefixtures("home")

ROOT = Path(__file__).parent.parent


# ---------------------------------------------------------------- rows as a table would have them

FUNCTIONS = {}


def mapped(key, native, *, default):
    return Row(key=key, status="mapped", default=default, native=(native,))


def translated(key, function, *native, default, reason=""):
    FUNCTIONS[function.__name__] = function
    return Row(
        key=key,
        status="translated",
        default=default,
        native=native,
        function=function.__name__,
        reason=reason,
    )


def derived(key, function, *, default, reason):
    return replace(translated(key, function, default=default, reason=reason), status="derived")


def coming(key, area, *, default, harmless=()):
    return Row(key=key, status="coming", default=default, area=area, harmless=harmless)


def unread(key, reason, *, default):
    return Row(key=key, status="derived", default=default, reason=reason)


def refused(key, reason, *, default):
    return Row(key=key, status="refused", default=default, reason=reason)


# ---------------------------------------------------------------- a dialect of our own


def batch(v):
    """prompts a step and a mini-batch that must divide them, as verl has it."""
    if v["loop.prompts"] % v["loop.mini"]:
        raise ConfigError(f"loop.prompts={v['loop.prompts']} must be divisible by loop.mini={v['loop.mini']}")
    return {
        "train.tasks_per_step": v["loop.prompts"],
        "train.minibatches": v["loop.prompts"] // v["loop.mini"],
    }


def files(v):
    return {f"data.train.{n}.path": path for n, path in enumerate(v["files"])}


def held_out(v):
    return {"data.eval.0.path": v["held_out"]} if v["held_out"] else {}


def agrees(v):
    if v["loop.copies"] != v["net.n"]:
        raise ConfigError("loop.copies must be what net.n is")
    return {}


def reward(v):
    return {"rewards.score.function": v["judge"], "rewards.score.arguments": dict(v["judge_args.*"])}


TOY = (
    mapped("loop", "train", default={}),
    translated(
        "loop.prompts", batch, "train.tasks_per_step", "train.minibatches", default=8, reason="as it is"
    ),
    translated("loop.mini", batch, "train.minibatches", default=4, reason="prompts / mini"),
    mapped("loop.steps", "train.steps", default=10),
    derived("loop.copies", agrees, default="${net.n}", reason="what net.n is"),
    mapped("loop.lr", "train.optimizer.lr", default=1e-6),
    mapped("loop.rate", "train.optimizer.lr", default=1e-6),
    mapped("loop.clip", "train.optimizer.max_grad_norm", default=None),
    mapped("loop.save", "train.gradient_checkpointing", default=False),
    mapped("loop.vf_lr", "critic.optimizer.lr", default=2e-5),
    coming("loop.fsdp", "sharded training", default=False, harmless=(None,)),
    coming("lora", "LoRA", default=None),
    coming("lora.r", "LoRA", default=8),
    unread("net.workers", "there is one process", default=1),
    coming("net.swap", "host memory", default=4),
    refused("net.trust", "trust_remote_code is never on; vendor the code", default=False),
    mapped("net.n", "rollout.group_size", default=4),
    mapped("net.temp", "rollout.sampling.temperature", default=0.5),
    mapped("net.path", "model.path", default="~/m"),
    mapped("net.over.*", "model.overrides", default={}),
    mapped("net.over.layers", "model.overrides.num_hidden_layers", default=None),
    translated("files", files, "data.train", default=["a.jsonl"], reason="each a source"),
    translated("held_out", held_out, "data.eval", default="", reason="one source"),
    mapped("looks", "eval.interval", default=0),
    translated("judge", reward, "rewards", default="exact", reason="a function"),
    translated("judge_args.*", reward, "rewards", default={}, reason="its arguments"),
    coming("parts", "parts", default=[]),
    coming("parts[].name", "parts", default=""),
    coming("extra", "buffers", default={}),
    coming("extra.<name>.path", "buffers", default=""),
    mapped("label", "name", default="toy"),
)
ON = Dialect(
    name="toy",
    rows=TOY,
    functions=FUNCTIONS.__getitem__,
    aliases={"loop.learning_rate": ("loop.lr", ""), "loop.batch": ("loop.prompts", "renamed in 2")},
    nulls=("None",),
)


@pytest.fixture
def toy(monkeypatch):
    """The toy dialect among the real ones."""
    rows, aliases, spans, function = table_rows.rows, table_rows.aliases, table_rows.spans, tables.function
    monkeypatch.setattr(table_rows, "rows", lambda system: TOY if system == "toy" else rows(system))
    monkeypatch.setattr(
        table_rows, "aliases", lambda system, files: ON.aliases if system == "toy" else aliases(system, files)
    )
    monkeypatch.setattr(
        table_rows, "spans", lambda system, files: {} if system == "toy" else spans(system, files)
    )
    monkeypatch.setattr(
        tables,
        "function",
        lambda system, name: FUNCTIONS[name] if system == "toy" else function(system, name),
    )
    monkeypatch.setitem(tables.TABLES, "toy", ("toy", ""))
    monkeypatch.setitem(versions.VERSIONS, "toy", ("1", "2"))
    monkeypatch.setitem(versions.DOCUMENTS, "toy", "1")
    monkeypatch.setitem(tables.FILES, "toy", tables.FileKind(tables=("toy",), nulls=("None",)))


def told(tree, of=ON):
    """The problems of a tree, in one text."""
    made = translate(parse(tree).tree if isinstance(tree, str) else tree, of, origins={})
    return "\n".join(f"{place}: {text}" for place, text in (*made.problems, *made.unbuilt))


def native(tree):
    made = translate(parse(tree).tree, ON, origins={})
    assert made.problems == ()
    return made.tree


def written(tmp_path, text, name="file.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


# ---------------------------------------------------------------- translation


def test_an_empty_file_means_the_defaults_of_its_document():
    assert native("{}") == {
        "train": {
            "tasks_per_step": 8,
            "minibatches": 2,
            "steps": 10,
            "optimizer": {"lr": 1e-6, "max_grad_norm": None},
        },
        "critic": {"optimizer": {"lr": 2e-5}},
        "rollout": {"group_size": 4, "sampling": {"temperature": 0.5}},
        "model": {"path": "~/m"},
        "data": {"train": [{"path": "a.jsonl"}]},
        "rewards": {"score": {"function": "exact", "arguments": {}}},
        "name": "toy",
    }


def test_what_is_given_goes_over():
    made = native(
        "loop: {prompts: 12, mini: 3, lr: 1e-3, save: true}\nfiles: [x, y]\n"
        "judge_args: {a: 1}\nnet: {over: {q: 2, layers: 3}}"
    )
    assert made["train"]["tasks_per_step"] == 12
    assert made["train"]["minibatches"] == 4
    assert made["train"]["optimizer"]["lr"] == 1e-3
    assert made["train"]["gradient_checkpointing"] is True
    assert made["data"]["train"] == [{"path": "x"}, {"path": "y"}]
    assert made["rewards"]["score"]["arguments"] == {"a": 1}
    assert made["model"]["overrides"] == {"q": 2, "num_hidden_layers": 3}


def test_each_function_is_called_once():
    calls = []

    def count(v):
        calls.append(dict(v))
        return {"seed": v["a"] + v["b"]}

    rows = (
        translated("a", count, "seed", default=1, reason=""),
        translated("b", count, "seed", default=2, reason=""),
    )
    made = translate({"a": 5}, Dialect(name="two", rows=rows, functions=FUNCTIONS.__getitem__), origins={})
    assert made.tree == {"seed": 7}
    assert calls == [{"a": 5, "b": 2}]


def test_the_given_row_wins_over_a_default_and_two_given_ones_must_agree():
    assert native("loop: {rate: 0.5}")["train"]["optimizer"]["lr"] == 0.5
    assert native("loop: {rate: 0.5, lr: 0.5}")["train"]["optimizer"]["lr"] == 0.5
    said = told("loop: {rate: 0.5, lr: 0.25}")
    assert "loop.rate asks for train.optimizer.lr=0.5, loop.lr for 0.25; keep one of them" in said


def test_other_names_are_read_with_a_note():
    made = translate({"loop": {"batch": 16}}, ON, origins={})
    assert made.tree["train"]["tasks_per_step"] == 16
    assert [line.note for line in made.lines if line.given] == [
        "loop.batch is read as loop.prompts: renamed in 2"
    ]
    assert "given twice, as 16 and 8" in told({"loop": {"batch": 8, "prompts": 16}}).replace(
        "8 and 16", "16 and 8"
    )
    assert told({"loop": {"batch": 16, "prompts": 16}}) == ""


def test_references_see_the_defaults_of_the_document():
    assert native("label: ${net.path}-${loop.steps}")["name"] == "~/m-10"
    assert native("loop: {prompts: '${net.n}'}")["train"]["tasks_per_step"] == 4
    assert told("judge: ${net.pat}\nloop: {mini: 3}") == ": judge: Interpolation key 'net.pat' not found"


def test_a_reference_in_a_default_follows_the_file():
    assert told("net: {n: 3}\nloop: {copies: 3}") == ""
    assert "loop.copies must be what net.n is" in told("net: {n: 3}\nloop: {copies: 4}")
    assert told("net: {n: 3}") == ""


def test_a_text_of_the_file_with_a_reference_in_it_stays_text():
    assert native("label: a\\${b}")["name"] == "a\\${b}"  # native YAML reads that as a${b}


def test_a_section_that_was_a_file_of_its_own_refers_to_itself():
    rows = (
        mapped("box.in.a", "train.steps", default=3),
        mapped("box.in.b", "rollout.group_size", default="${in.a}"),
        mapped("box.in.c", "seed", default=0),
    )
    of = Dialect(name="boxed", rows=rows, functions=FUNCTIONS.__getitem__, inner="box")
    assert translate({}, of, origins={}).tree == {"train": {"steps": 3}, "rollout": {"group_size": 3}}
    made = translate({"box": {"in": {"a": 5, "c": "${in.b}"}}}, of, origins={})
    assert made.tree == {"train": {"steps": 5}, "rollout": {"group_size": 5}, "seed": 5}


def test_optional_tables_count_only_where_given():
    rows = (
        mapped("a", "seed", default=1),
        mapped("b", "seed", default=2),
        mapped("c", "train.steps", default=4),
    )
    of = Dialect(name="some", rows=rows, functions=FUNCTIONS.__getitem__, optional=frozenset({"b", "c"}))
    assert translate({}, of, origins={}).tree == {"seed": 1}
    assert translate({"b": 3}, of, origins={}).tree == {"seed": 3}


def test_entries_of_a_list_feed_entries_of_a_list():
    rows = (
        translated("s", lambda v: {}, default=[], reason=""),
        mapped("s[].steps", "stages.*.train.steps", default=None),
        mapped("s[].name", "stages.*.name", default=None),
    )
    made = translate(
        {"s": [{"name": "a", "steps": 2}, {"name": "b"}]},
        Dialect(name="l", rows=rows, functions=FUNCTIONS.__getitem__),
        origins={},
    )
    assert made.tree == {"stages": [{"train": {"steps": 2}, "name": "a"}, {"name": "b"}]}


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("loop: {fsdp: true}", "got true; coming, not built yet: sharded training (accepted today: false, null)"),
        ("lora: {r: 8}", 'lora: got {"r": 8}; coming, not built yet: LoRA'),
        ("lora: {r: 9}", "lora.r: got 9; coming"),
        ("net: {workers: 2}", "net.workers: got 2; there is one process (accepted today: 1)"),
        ("net: {swap: 8}", "net.swap: got 8; coming, not built yet: host memory"),
        ("net: {trust: true}", "net.trust: got true; trust_remote_code is never on; vendor the code"),
        ("net: {trust: 0}", "net.trust: got 0"),
        ("parts: [{name: x}]", 'parts[0].name: got "x"; coming'),
        ("extra: {mine: {path: x}}", 'extra.mine.path: got "x"; coming'),
        ("loop: {prompts: 10, mini: 4}", "loop.prompts=10 must be divisible by loop.mini=4"),
        ("loop: 3", "loop: got 3, expected a section (keys: prompts, mini"),
        ("parts: {name: x}", 'parts: got {"name": "x"}, expected a list of sections'),
        ("loop: {lr: fast}", 'loop.lr: got "fast", expected a number'),
        ("loop: {steps: true}", "loop.steps: got true, expected a number"),
        ("loop: {save: flase}", 'loop.save: got "flase", expected true or false'),
        ("loop: {save: 1}", "loop.save: got 1, expected true or false"),
        ("loop: {lr: {}}", "loop.lr: got {}, expected one value, like 1e-06"),
        ("loop: {lr: {a: 1}}", "loop.lr.a: unknown key"),
        ("nope: [{a: 1}]", "nope[].a: unknown key"),
        ("nope: 1", "nope: unknown key"),
        ("nope: {deep: {er: 1}}", "nope.deep.er: unknown key"),
        ("nope: {}", "nope: unknown key"),
    ],
)  # fmt: skip
def test_refusals(text, said):
    assert said in told(text)


@pytest.mark.parametrize(
    "text",
    [
        "loop: {fsdp: false}",
        "loop: {fsdp: null}",
        "lora: null",
        "lora: {}",
        "loop: null",
        "loop: {}",
        "net: {workers: 1.0, swap: 4, trust: false}",
        "parts: []",
        "extra: {}",
        "extra: {any: {path: ''}}",
    ],
)
def test_defaults_and_harmless_values_pass(text):
    assert native(text) == native("{}")


def test_values_mean_what_they_mean_there():
    assert native("loop: {lr: '1e-3'}")["train"]["optimizer"]["lr"] == 1e-3
    assert native("loop: {lr: 1e-3}")["train"]["optimizer"]["lr"] == 1e-3
    assert native("loop: {save: yes}")["train"]["gradient_checkpointing"] is True
    assert native("loop: {clip: None}")["train"]["optimizer"]["max_grad_norm"] is None
    assert native("label: None")["name"] == "None"  # its default is a text
    made = translate({"loop": {"lr": "1e-3", "clip": "None"}}, ON, origins={})
    assert [line.note for line in made.lines if line.given] == [
        'the text "1e-3" is read as 0.001',
        'the text "None" is read as null',
    ]


def test_true_is_not_one():
    assert same(1, 1.0)
    assert same([1, {"a": None}], (1, {"a": None}))
    assert same(True, True)
    assert not same(1, True)
    assert not same([0], [False])
    assert not same({"a": 0}, {"a": False})
    assert not same([1], [1, 2])


def test_all_problems_have_their_place():
    origins = {("loop", "lr"): "f:2", ("loop",): "f:1", ("net", "n"): "f:4", ("loop", "mini"): "f:3"}
    made = translate({"loop": {"lr": "x", "mini": 3}, "net": {"n": 4}}, ON, origins=origins)
    assert made.problems == (
        ("f:2", 'loop.lr: got "x", expected a number'),
        ("f:3", "loop.prompts=8 must be divisible by loop.mini=3"),
    )


# ---------------------------------------------------------------- near misses


def test_suggestions():
    assert suggest(("loop", "promts"), ON) == ["loop.prompts"]
    assert suggest(("lop", "promts"), ON) == ["loop.prompts"]
    assert suggest(("lop", "prompts"), ON) == ["loop.prompts"]
    assert suggest(("prompts",), ON) == ["loop.prompts"]
    assert suggest(("net", "promptz"), ON) == ["loop.prompts"]
    assert suggest(("nett", "over", "any"), ON) == ["net.over"]
    assert suggest(("extra", "mine", "paht"), ON) == ["extra.<name>.path"]
    assert suggest(("zzzzzz",), ON) == []
    assert suggest(("loop", "pits"), ON) == []  # half of the letters of `path` are others
    assert "known here: prompts, mini" in told("loop: {qqqqqqq: 1}")


def test_a_typo_does_not_pass_as_a_name_of_the_user_s():
    assert "net.over.layerz: unknown key; did you mean net.over.layers?" in told("net: {over: {layerz: 1}}")
    assert told("net: {over: {q: 1}}") == ""


def test_a_key_of_another_system_is_named_as_such():
    made = told("train: {steps: 3}")
    assert "train.steps: unknown key; did you mean loop.steps?" in made
    assert "a native key" in made


# ---------------------------------------------------------------- overrides


def test_overrides_in_hydra_s_style():
    base = {"a": {"b": 1, "l": [{"c": 1}, 2]}}
    origins = {("a", "b"): "f:1"}
    out = overridden(base, origins, ["a.b=1e-6", "+a.d=[x,{y:1}]", "++e.f='t: u'", "~a.l", "g=", "h=null"])
    assert out.problems == []
    assert out.tree == {"a": {"b": 1e-6, "d": ["x", {"y": 1}]}, "e": {"f": "t: u"}, "g": "", "h": None}
    assert out.origins[("a", "b")] == "override a.b=1e-6"
    assert base == {"a": {"b": 1, "l": [{"c": 1}, 2]}}
    assert overridden(base, {}, ["a.l.0.c=5", "a.l.1=6"]).tree == {"a": {"b": 1, "l": [{"c": 5}, 6]}}
    assert overridden({}, {}, ["u={url:http://x}"]).tree == {"u": {"url": "http://x"}}
    starred = overridden({}, {}, [r"u={layers.\{*\}:{},head:{a:1}}", "m=['layers.{*}']"])
    assert starred.problems == []
    assert starred.tree == {"u": {"layers.{*}": {}, "head": {"a": 1}}, "m": ["layers.{*}"]}
    quoted = overridden({}, {}, ["""a=["hi,there:you"]""", """b={system:"x, y:z",n:{'k,j:l':1}}"""])
    assert quoted.tree == {"a": ["hi,there:you"], "b": {"system": "x, y:z", "n": {"k,j:l": 1}}}
    listed = overridden({}, {}, ["u=[127.0.0.1:8001,127.0.0.1:8002,{a:1,b-c/d:[x:y,z:w]}]"])
    assert listed.tree == {"u": ["127.0.0.1:8001", "127.0.0.1:8002", {"a": 1, "b-c/d": ["x:y", "z:w"]}]}


def test_a_section_as_an_override_is_put_over_the_one_that_is_there():
    """As OmegaConf does for Hydra: what it does not name stays, and an empty one changes nothing."""
    base = {"a": {"lr": 1, "decay": 2, "in": {"x": 1}}, "l": [1, 2]}
    origins = {("a", "decay"): "f:2"}
    out = overridden(base, origins, ["a={lr:5,in:{y:6}}", "+a={new:7}", "a={}", "l=[3]", "n={z:8}"])
    assert out.tree == {
        "a": {"lr": 5, "decay": 2, "in": {"x": 1, "y": 6}, "new": 7}, "l": [3], "n": {"z": 8},
    }  # fmt: skip
    assert out.origins[("a", "decay")] == "f:2"
    assert out.origins[("a", "in", "y")] == "override a={lr:5,in:{y:6}}"
    assert overridden(base, {}, ["a=null"]).tree["a"] is None
    omega = OmegaConf.create(base)
    for key, value in {"a": {"lr": 5, "in": {"y": 6}}, "l": [3], "n": {"z": 8}}.items():
        OmegaConf.update(omega, key, value, merge=True, force_add=True)
    assert (
        OmegaConf.to_container(omega) == overridden(base, {}, ["a={lr:5,in:{y:6}}", "l=[3]", "n={z:8}"]).tree
    )


def test_a_deletion_with_a_value_needs_that_value():
    """As in Hydra."""
    base = {"a": 5, "s": "x", "d": {"e": [1, 2]}}
    assert overridden(base, {}, ["~a=5", "~s=x", "~d={e:[1,2]}"]).tree == {}
    out = overridden(base, {}, ["~a=7", "~s=", "~d={e:[1]}", "~a=true"])
    assert out.tree == base
    assert [said.partition(";")[0] for _, said in out.problems] == [
        "a is 5, not 7",
        's is "x", not ""',
        'd is {"e": [1, 2]}, not {"e": [1]}',
        "a is 5, not true",
    ]


@pytest.mark.parametrize("text", ["a", "=1", "--a=1", "a.l.7=1", "a@b=1", "a=[1", "a.l.x=1"])
def test_overrides_that_are_refused(text):
    out = overridden({"a": {"l": [1]}}, {}, [text])
    assert len(out.problems) == 1
    assert out.problems[0][0] == f"override {text}"
    assert out.tree == {"a": {"l": [1]}}


def test_what_is_left_out_of_the_systems_own_document_has_no_effect_here_or_is_refused(tmp_path):
    file, script = tmp_path / "verl.yaml", tmp_path / "run.sh"
    file.write_text("actor_rollout_ref: {actor: {ppo_micro_batch_size_per_gpu: 8}}\n")
    script.write_text('python -m verl.trainer.main_ppo "$@"\n')
    for path, given in ((file, []), (script, ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"])):
        fits = [
            *given,
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        ]
        load(path, [*fits, "~data.return_raw_chat"], dialect="verl")  # nothing here reads it
        with pytest.raises(ConfigError, match=r"~data\.zzz: there is no data\.zzz in the file to remove"):
            load(path, [*fits, "~data.zzz"], dialect="verl")
        with pytest.raises(
            ConfigError, match=r"data\.train_batch_size cannot be left out of verl's own document"
        ):
            load(path, [*fits, "~data.train_batch_size"], dialect="verl")
        load(path, [*fits, "~data.return_raw_chat=false"], dialect="verl")
        with pytest.raises(ConfigError, match=r"data\.return_raw_chat is false, not true"):
            load(path, [*fits, "~data.return_raw_chat=true"], dialect="verl")


# ---------------------------------------------------------------- loading


FILE = """\
loop:
  prompts: 4
  lr: 1e-3
net:
  path: models/tiny
  n: 2
files: [x.jsonl]
"""


def test_a_foreign_file_loads_and_points_back(tmp_path, toy):
    path = written(tmp_path, FILE)
    loaded = load(path, ["loop.steps=3", "+net.temp=1.0"], {"seed": 4})
    assert loaded.translation.dialect == "toy"
    assert (loaded.config.train.optimizer.lr, loaded.config.train.steps, loaded.config.seed) == (1e-3, 3, 4)
    assert loaded.where("train.optimizer.lr") == f"{path}:3 loop.lr"
    assert loaded.where("train.tasks_per_step") == f"{path}:2 loop.prompts"
    assert loaded.where("data.train.0.path") == f"{path}:7 files"
    assert loaded.where("train.steps") == "override loop.steps=3"
    assert loaded.where("name") == "default of label (toy)"
    assert loaded.config.run_dir == "runs/toy"


def test_errors_after_translation_speak_of_the_foreign_key(tmp_path, toy):
    path = written(tmp_path, FILE.replace("1e-3", "-1"))
    with pytest.raises(ConfigError, match=rf"{path}:3 loop\.lr: train\.optimizer\.lr: got -1"):
        load(path)
    path = written(tmp_path, FILE.replace("prompts: 4", "prompts: 4\n  mini: 1").replace("n: 2", "n: 1"))
    with pytest.raises(ConfigError, match=rf"{path}:7 net\.n: rollout\.group_size"):
        plans(load(path))


def test_keys_that_nothing_reads_are_left_out_with_a_word(tmp_path, toy):
    loaded = load(written(tmp_path, FILE + "looks: 5\n"))
    assert "critic" not in loaded.config.model_fields_set
    assert "eval" not in loaded.config.model_fields_set
    lines = {line.key: line for line in loaded.translation.lines}
    assert lines["looks"].native == ()
    assert "eval.interval has no effect: there is nothing to evaluate" in lines["looks"].note
    assert (lines["loop.vf_lr"].native, lines["loop.vf_lr"].note) == ((), ""), "a default is no news"
    given = load(written(tmp_path, FILE + "looks: 5\n"), ["loop.vf_lr=1e-4"]).translation.lines
    assert any("has no critic" in line.note for line in given if line.key == "loop.vf_lr")
    plans(loaded)
    read_now = load(written(tmp_path, FILE + "looks: 5\nheld_out: y.jsonl\n"))
    assert read_now.config.eval.interval == 5


def test_what_a_function_adds_is_no_news_where_nothing_reads_it(tmp_path):
    """The unit of a schedule is of no key of verl's: a file with a constant rate did not ask for it."""
    text = "actor_rollout_ref: {actor: {optim: {lr: 2e-6, weight_decay: 0.0}}}\ndata: {train_files: [a.parquet]}\n"
    loaded = load(written(tmp_path, text), dialect="verl-ppo")
    lines = {line.key: line for line in loaded.translation.lines if line.given}
    assert "schedule" not in loaded.config.train.optimizer.model_fields_set
    assert not [line.note for line in lines.values() if "has no effect" in line.note]


def test_native_keys_stand_below_whet(tmp_path, toy):
    path = written(
        tmp_path, FILE + "whet:\n  reward_workers: {timeout_s: 3.5}\n  train: {optimizer: {lr: 0.5}}\n"
    )
    loaded = load(path, ["whet.machine.device=cpu"])
    assert (loaded.config.reward_workers.timeout_s, loaded.config.train.optimizer.lr) == (3.5, 0.5)
    assert loaded.config.machine.device == "cpu"
    assert loaded.where("reward_workers.timeout_s") == f"{path}:9"
    with pytest.raises(ConfigError, match="unknown key"):
        load(path, ["whet.machine.devise=cpu"])
    with pytest.raises(ConfigError, match=rf"{path}:8: whet: expected a section of native keys"):
        load(written(tmp_path, FILE + "whet: 3\n"))


def test_toml_and_broken_files(tmp_path, toy):
    toml = written(tmp_path, '[loop]\nlr = 1e-3\n[net]\npath = "m"\n', "f.toml")
    assert load(toml).where("train.optimizer.lr") == f"{toml}:2 loop.lr"
    twice = written(tmp_path, "loop: {lr: 1, lr: 2}\nnet: {nn: 1}\n")
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*given twice, in lines.*did you mean net\.n\?"):
        load(twice)


# ---------------------------------------------------------------- recognising


def test_recognition(toy):
    assert recognise(parse(FILE).tree) == "toy"
    assert recognise({}) == "native"
    assert recognise({"train": {"steps": 3}, "seed": 1}) == "native"
    assert recognise({"trian": {"steps": 3}}) == "native"  # nobody knows it: the native errors are the best
    assert recognise({"train": {"stesp": 3}, "seed": 1}) == "native"
    assert recognise({"train": {"steps": 3}}, "toy") == "toy"
    assert recognise(parse(FILE).tree, "native") == "native"
    with pytest.raises(ConfigError, match="--dialect verll: expected native, verl, skyrl"):
        recognise({}, "verll")


def test_a_tie_is_not_guessed(toy, monkeypatch):
    monkeypatch.setitem(tables.FILES, "toy-too", tables.FileKind(tables=("toy",)))
    with pytest.raises(ConfigError, match=r"toy and toy-too each know 100% of its keys.* --dialect toy"):
        recognise(parse(FILE).tree)
    monkeypatch.setitem(tables.FILES, "toy-too", tables.FileKind(tables=("toy",), sign=("judge", ("x",))))
    assert recognise(parse(FILE).tree) == "toy"


def test_native_files_do_not_import_the_tables():
    modules = sorted({module for module, _ in TABLES.values()})
    code = (
        "import sys; from whet.config.load import load; load('examples/first_run.yaml');"
        f"sys.exit(any(f'whet.dialects.{{m}}' in sys.modules for m in {modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


# ---------------------------------------------------------------- converting, reporting


def test_convert_gives_an_equal_config_and_is_idempotent(tmp_path, toy):
    path = written(
        tmp_path, FILE + "label: 'a # b: ${net.path} \\${c}'\njudge_args: {k: ['1e-3', null, {z: [1.0]}]}\n"
    )
    first = load(path)
    text = native_yaml(first)
    assert "lr: 0.001" in text
    assert f"# {path}:3 loop.lr" in text
    assert "# default of label (toy)" not in text
    again = load(written(tmp_path, text, "native.yaml"))
    assert again.config == first.config
    assert again.translation is None
    assert again.config.name == "a # b: models/tiny ${c}"
    assert parse(native_yaml(again)).tree == parse(text).tree
    assert native_yaml(load(written(tmp_path, native_yaml(again), "native.yaml"))) == native_yaml(
        load(written(tmp_path, native_yaml(again), "native.yaml"))
    )


EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in (".yaml", ".toml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_convert(example, tmp_path):
    """A native file to itself but for comments, a foreign one to an equal config."""
    loaded = load(example)
    text = native_yaml(loaded)
    if loaded.translation is None:
        assert parse(text).tree == parse(example.read_text()).tree
    assert load(written(tmp_path, text)).config == loaded.config


@pytest.mark.parametrize(
    "value",
    ["", "a", "off", "true", "1e-3", "a: b", "a #b", " x", "x ", "\u2028", "a\nb", "'", '"', "é", "😀\x85", "\x7f",
     None, 1, 1e-6, 1e30, [], {}, [1, ["a, b"]], {"a b": "c"}, "-", "- a", "~", "null", "[x]", "a,b", "${x}"],
)  # fmt: skip
def test_scalars_read_back_as_they_are(value):
    assert same(parse(f"k: {scalar(value)}\n").tree, {"k": value})


def test_the_report(tmp_path, toy):
    made = load(written(tmp_path, FILE + "looks: 5\n")).translation
    assert counts([line for line in made.lines if line.given]) == {"mapped": 4, "translated": 2}
    assert summary(made).startswith("toy file, read as 1: 6 keys given (4 mapped, 2 translated)")
    page = markdown(made, "t")
    assert "| `loop.prompts` | `4` | translated | `train.tasks_per_step`" in page
    assert '| `label` | `"toy"` | mapped | `name` |' in page


def test_the_commands(tmp_path, toy, monkeypatch):
    path, out, report = written(tmp_path, FILE), tmp_path / "n.yaml", tmp_path / "r.md"
    run = CliRunner()
    done = run.invoke(
        cli.app, ["convert", str(path), "loop.steps=7", "-o", str(out), "--report", str(report)]
    )
    assert done.exit_code == 0, done.output
    assert load(out).config.train.steps == 7
    assert "| `loop.steps` | `7` |" in report.read_text()
    done = run.invoke(cli.app, ["convert", str(out), "--report", str(tmp_path / "other.md")])
    assert "is a native config" in str(done.exception)
    assert not (tmp_path / "other.md").exists()
    done = run.invoke(cli.app, ["plan", str(path), "--dialect", "toy"])
    assert done.exit_code == 0
    assert "toy file, read as 1: 5 keys given" in done.output
    listed = json.loads(
        run.invoke(cli.app, ["keys", "--json", "--dialect", "toy", "--status", "refused"]).output
    )
    assert listed == [
        {
            "dialect": "toy",
            "key": "net.trust",
            "since": "",
            "until": "",
            "status": "refused",
            "native": [],
            "reason": TOY[15].reason,
            "unbuilt": [],
        }
    ]
    shown = run.invoke(cli.app, ["keys", "--dialect", "toy"], env={"COLUMNS": "40"}).output.splitlines()
    assert "toy  loop.prompts  translated: train.tasks_per_step, train.minibatches" in shown, (
        "a key is whole in any terminal"
    )
    below = shown[shown.index("toy  net.trust  refused") + 1]
    assert below.startswith("    ")
    assert "vendor" in " ".join(shown)
    with pytest.raises(ConfigError, match="--status oops: expected one of mapped"):
        run.invoke(cli.app, ["keys", "--status", "oops"], catch_exceptions=False)


# ---------------------------------------------------------------- who is named


def test_keys_of_one_feature_are_refused_together():
    at = {("parts", 0, "name"): "f:1", ("parts", 1, "name"): "f:2", ("lora", "r"): "f:3"}
    made = translate({"parts": [{"name": "a"}, {"name": "b"}], "lora": {"r": 4}}, ON, origins=at)
    assert made.problems == ()
    assert dict(made.unbuilt) == {
        "f:1": 'parts[0].name: got "a"; coming, not built yet: parts; also asked for by parts[1].name="b" (f:2)',
        "f:3": "lora.r: got 4; coming, not built yet: LoRA (accepted today: 8)",
    }


def test_a_feature_that_is_refused_has_each_reason_of_its_keys_once():
    why = {"a": "A is one.", "b": "B is two. It is more.", "c": "A is one.", "d": ""}
    rows = tuple(
        replace(coming(f"net.{key}", "nets", default=0), reason=reason) for key, reason in why.items()
    )
    made = translate(
        {"net": dict.fromkeys(why, 1)},
        Dialect(name="two", rows=rows, functions=FUNCTIONS.__getitem__),
        origins={("net", key): f"f:{n}" for n, key in enumerate(why)},
    )
    text = (
        "net.a: got 1; coming, not built yet: nets: A is one; also asked for by net.c=1 (f:2); net.b=1 (f:1): B is "
        "two. It is more; net.d=1 (f:3)"
    )
    assert made.unbuilt == (("f:0", text),)


def test_an_override_is_not_blamed_for_anothers_fault():
    """The complaint names a key that only the default sets; the key that is given plays no part in it."""

    def fits(v):
        raise ConfigError("width.depth=3 must be even")

    rows = (
        translated("width.depth", fits, "seed", default=3),
        translated("width.other", fits, "seed", default=1),
    )
    of = Dialect(name="two", rows=rows, functions=FUNCTIONS.__getitem__)
    made = translate({"width": {"other": 2}}, of, origins={("width", "other"): "override width.other=2"})
    assert made.problems == (("", "width.depth=3 must be even"),)


# ---------------------------------------------------------------- versions of a system


def lined(key, default, *, since="", until=""):
    return Row(key=key, status="mapped", default=default, native=("seed",), since=since, until=until)


VERL = """
data: {train_files: a.parquet, val_files: b.parquet}
actor_rollout_ref:
  model: {path: m}
  actor: {ppo_micro_batch_size_per_gpu: 8}
  ref: {log_prob_micro_batch_size_per_gpu: 8}
  rollout: {name: vllm, log_prob_micro_batch_size_per_gpu: 8}
critic: {ppo_micro_batch_size_per_gpu: 8, model: {path: m}}
"""
"""What every release of verl needs."""

RELEASES = ("1.0", "1.1", "2.0", "main")


@pytest.mark.parametrize(("version", "default"), [("1.0", 1), ("1.1", 1), ("2.0", 2), ("main", 2)])
def test_a_key_has_the_line_of_its_version(version, default):
    rows = (lined("a", 1, until="2.0"), lined("a", 2, since="2.0"))
    assert [row.default for row in versions.at_version(rows, version, RELEASES)] == [default]


def test_a_key_of_no_span_has_the_nearest_line():
    rows = (lined("a", 1, until="1.1"), lined("a", 2, since="main"))
    assert [versions.at_version(rows, at, RELEASES)[0].default for at in RELEASES] == [1, 1, 2, 2]


def test_a_file_is_read_as_the_version_that_has_its_keys(tmp_path, toy, monkeypatch):
    monkeypatch.setitem(versions.VERSIONS, "toy", RELEASES)
    monkeypatch.setitem(versions.DOCUMENTS, "toy", "1.0")
    old, new = [table_rows.VersionRange("", "2.0")], [table_rows.VersionRange("1.1", "")]

    def best(given):
        return versions.first_of(versions.fitting(given, "toy"), "toy")

    assert best([]) == "1.0", "nothing tells: the document's"
    assert best([[table_rows.VersionRange("", "")]]) == "1.0"
    assert best([new]) == "main"
    assert best([old, new]) == "1.1", "the only one that has both"
    assert versions.version_named("toy", "1") == "1.1"
    with pytest.raises(ConfigError, match=r"toy@3: expected one of 1\.0, 1\.1, 2\.0, main"):
        versions.version_named("toy", "3")


def test_a_version_may_be_said_and_what_it_has_not_is_told(tmp_path):
    path = written(tmp_path, VERL)
    assert load(path, dialect="verl").translation.version == versions.DOCUMENTS["verl"]
    said = load(path, dialect="verl@0.9", here=False).translation
    assert said.version == "0.9.1"
    assert summary(said).startswith("verl-ppo file, read as 0.9.1")
    with pytest.raises(ConfigError, match=r"--dialect verl@7: expected one of 0\.4\.0"):
        load(path, dialect="verl@7")
    of = Dialect(
        name="t",
        rows=(lined("a", 1, since="0.9.0"),),
        functions=FUNCTIONS.__getitem__,
        system="verl",
        version="0.4.0",
    )
    (line,) = translate({"a": 5}, of, origins={}).lines
    assert line.note == "verl 0.4.0 does not have it (since 0.9.0)"
    assert versions.since({versions.VERSION: "0.9.0"}, "verl", "0.7.1")
    assert not versions.since({}, "verl", "0.7.1")


@pytest.mark.parametrize("system", ["verl", "skyrl", "cosmos", "trinity"])
def test_spans_of_a_key_follow_each_other(system):
    """Unique by key and since, each from before its end, none over another."""
    releases, spans = versions.VERSIONS[system], {}
    for row in table_rows.rows(system):
        first = releases.index(row.since) if row.since else 0
        end = releases.index(row.until) if row.until else len(releases)
        assert first <= end, row
        spans.setdefault((row.file, row.key), []).append((first, max(end, first)))
    for key, found in spans.items():
        found.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(found)), key


def test_a_foreign_key_is_added_by_one_line_of_its_table(tmp_path, monkeypatch):
    """It is read, checked, listed and documented; nothing else of whet knows of it."""
    from whet.dialects import docs, listing

    line = dict.fromkeys((column.name for column in fields(Row)), "") | {
        "file": "ppo", "key": "trainer.brand_new", "type": "int>=0", "default": "0", "status": "mapped",
        "native": "seed", "since": "0.9.0", "reason": "The seed of all.",
    }  # fmt: skip
    lines = table_rows.lines
    monkeypatch.setattr(table_rows, "lines", lambda system: (*lines(system), line))
    caches = (table_rows.rows, tables.every_line, tables.table, tables.dialect)
    for cached in caches:
        cached.cache_clear()
    try:
        tree = VERL + "trainer: {brand_new: %s}\n"
        made = load(written(tmp_path, tree % 7), dialect="verl", here=False)
        assert made.config.seed == 7
        assert made.where("seed").endswith("trainer.brand_new")
        with pytest.raises(ConfigError, match=r"trainer\.brand_new: got -1, expected a whole number >= 0"):
            load(written(tmp_path, tree % -1), dialect="verl")
        assert any(row["key"] == "trainer.brand_new" for row in listing.listed("verl-ppo", "mapped"))
        assert "| `trainer.brand_new` since 0.9.0 | `0` | mapped | `seed` | The seed of all. |" in docs.page(
            "from_verl.md"
        )
    finally:
        monkeypatch.undo()
        for cached in caches:
            cached.cache_clear()
