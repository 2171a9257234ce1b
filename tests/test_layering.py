"""The shape of the package, read off its source: who may import whom, and how long things may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from whet.config.keys import keys
from whet.config.schema import StageConfig

SRC = Path(__file__).parent.parent / "src"

LAYERS: list[set[str]] = [
    {
        "types",
        "secrets",
        "seeds",
        "tables",
        "config",
        "dialects",
        "environment",
        "inputs",
        "arguments",
    },
    {"batch", "algos", "data", "guard", "rewards", "simulate", "outputs"},
    {"envs", "models", "buffer", "track", "storage"},
    {"training", "rollout"},
    {"sync", "checkpoint", "evaluation", "early_stopping", "eval_loss", "offline", "judges"},
    {
        "loop",
        "stages",
        "stage",
        "context",
        "explorer",
        "learner",
        "trained_models",
        "weights",
        "recorder",
        "simulated_learner",
        "placement",
        "job",
        "whole",
        "disaggregated",
    },
    {
        "__main__",
        "cli",
        "commands_runs",
        "commands_engines",
        "commands_generate",
        "engines",
        "commands_studio",
        "notices",
        "options",
        "reference",
        "commands_records",
        "replay",
        "diff",
        "api",
        "start",
        "bench",
        "generation",
        "export",
        "rehearsal",
        "prove",
        "cluster",
        "view",
        "studio",
    },
]
"""By first name below `whet`; `whet/__init__.py` is of the last layer."""

OWN_MODULE = {
    "vllm",
    "sglang",
    "deepspeed",
    "megatron",
    "wandb",
    "mlflow",
    "swanlab",
    "trackio",
    "peft",
    "mcp",
    "gymnasium",
    "skyrl_gym",
}
"""Each is imported by one module at most; `ray`, by one package."""

PRODUCTS = {
    "mm", "matmul", "bmm", "addmm", "baddbmm", "addbmm", "einsum", "tensordot", "mv", "addmv", "dot", "vdot",
    "bilinear", "chain_matmul", "multi_dot", "scaled_dot_product_attention", "_int_mm", "_scaled_mm", "_grouped_mm",
}  # fmt: skip
"""Functions and methods that multiply matrices; `_` behind a name is the one in place. And `F.linear`, and `@`."""

MULTIPLIERS = {
    "whet.models.products": "the one place: every other module asks its `linear` and `product`",
    "whet.models.torch_ops": "attention in PyTorch: batches of matrices, padded to what gives a row the same bits",
    "whet.models.paged_kernel": "attention on a GPU: products of tiles inside its own kernel",
    "whet.models.quantised": "products in 8 bits: whole numbers, or a GPU's own float8",
    "whet.models.float8": "multiplies nothing: it knows `F.linear` by name, to put products in 8 bits there",
    "whet.models.muon": "a step of the optimizer: no engine computes it a second time",
    "whet.models.router": "sums over the tokens of a batch, for losses of routers: of no row alone",
    "whet.algos.implicit": "sums over the rollouts of a group, for advantages: of no row alone",
}
"""The modules that may multiply matrices themselves, and why each may."""

RUNS_CODE = {
    *(
        "eval",
        "exec",
        "compile",
        "__import__",
        "pickle.load",
        "pickle.loads",
        "pickle.Unpickler",
        "marshal.loads",
    ),
    *(
        "torch.load",
        "joblib.load",
        "shelve.open",
        "yaml.load",
        "yaml.unsafe_load",
        "yaml.full_load",
        "np.load",
    ),
    *("runpy.run_path", "runpy.run_module"),
}
"""Functions that may run what a file or a message holds."""
MAY_RUN_CODE = {
    "whet.__main__": {"exec"},
    "whet.guard.program": {"compile", "exec"},
    "whet.cluster.explorer": {"pickle.loads"},
    "whet.cluster.explorers": {"pickle.loads"},
    "whet.cluster.rewards": {"pickle.loads"},
    "whet.models.apart": {"pickle.loads"},
    "whet.rewards.host": {"pickle.loads"},
    "whet.training.rank": {"pickle.loads"},
    "whet.training.ranks": {"pickle.loads"},
}
"""An empty text; a program of a reply, in its sandbox; messages between processes that the run has started."""

MOST_LINES_OF_A_FILE = 600
MOST_LINES_OF_A_FUNCTION = 90
MOST_LINES_OF_THE_LOOP = 100
MOST_KEYS = 350
STEP = {"explorer.collect", "learner.prepare", "learner.learn", "weights.publish"}
"""What the loop asks of the parts of a stage."""


def files() -> dict[str, Path]:
    """The file of every module of the package, by dotted name."""
    found = {}
    for path in sorted((SRC / "whet").rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by dotted name, parsed."""
    return {
        name: ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for name, path in files().items()
    }


@pytest.fixture(autouse=True, scope="module")
def _trees_go() -> Iterator[None]:
    """They are 170 MB: no worker of the whole suite keeps them, and none has them before this file begins."""
    yield
    for known in (modules, imports, graph):
        known.cache_clear()


def package_of(name: str) -> str:
    """The package that relative imports in a module start from."""
    is_package = (SRC / Path(*name.split(".")) / "__init__.py").is_file()
    return name if is_package else name.rpartition(".")[0]


@cache
def imports(name: str, tree: ast.Module) -> set[str]:
    """Everything a module imports, at its head, under TYPE_CHECKING or inside a function."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package_of(name).split(".")
                base = ".".join([*above[: len(above) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in modules() else base)
    return found


@cache
def graph() -> dict[str, set[str]]:
    """Imports between modules of the package."""
    return {
        name: {i for i in imports(name, tree) if i in modules()} - {name} for name, tree in modules().items()
    }


def layer(name: str) -> int:
    part = name.split(".")[1] if "." in name else "cli"
    for number, parts in enumerate(LAYERS):
        if part in parts:
            return number
    raise LookupError(f"{name} stands in no layer: add it to LAYERS")


def test_the_walk_sees_the_package():
    assert {"whet.types", "whet.config.schema", "whet.batch"} <= modules().keys()
    assert graph()["whet.config.load"] >= {"whet.config.draft", "whet.types"}


def test_hidden_and_relative_imports_are_seen():
    tree = ast.parse("def f():\n    from whet import types\n    import ray.data\nfrom . import keys\n")
    assert imports("whet.config.load", tree) == {"whet.types", "ray.data", "whet.config.keys"}


def test_imports_go_to_the_own_layer_or_a_lower_one():
    wrong = [
        f"{name} (layer {layer(name)}) imports {target} (layer {layer(target)})"
        for name, targets in graph().items()
        for target in targets
        if layer(target) > layer(name)
    ]
    assert wrong == []


def test_training_and_rollout_never_see_each_other():
    sides = ("whet.training", "whet.rollout")
    assert set(sides) <= modules().keys()
    for one, other in (sides, sides[::-1]):
        mine = {name: targets for name, targets in graph().items() if name.startswith(one)}
        assert [(n, t) for n, targets in mine.items() for t in targets if t.startswith(other)] == []


def test_no_import_goes_in_a_circle():
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name not in done:
            for target in sorted(graph()[name]):
                visit(target, (*above, name))
            done.add(name)

    for name in graph():
        visit(name, ())


def test_a_heavy_engine_is_imported_by_one_module_only():
    users: dict[str, set[str]] = {}
    for name, tree in modules().items():
        for found in {i.partition(".")[0] for i in imports(name, tree)} & OWN_MODULE:
            users.setdefault(found, set()).add(name)
    assert {engine: names for engine, names in users.items() if len(names) > 1} == {}


def test_ray_stays_in_its_package():
    users = {
        name
        for name, tree in modules().items()
        if "ray" in {i.partition(".")[0] for i in imports(name, tree)}
    }
    assert users
    assert all(name.startswith("whet.cluster.") for name in users)


def products(tree: ast.Module) -> set[str]:
    """What a module multiplies matrices by."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult):
            found.add("@")
        elif isinstance(node, ast.Attribute):
            if node.attr.removesuffix("_") in PRODUCTS or (node.attr == "linear" and _functional(node.value)):
                found.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            found |= {a.name for a in node.names if a.name in PRODUCTS | {"linear"}}
    return found


def _functional(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2] in ("F", "functional")


def test_matrices_are_multiplied_in_one_place() -> None:
    """So a row's bits are looked after there. A module that shall multiply by itself needs a reason in MULTIPLIERS."""
    found = {name: what for name, tree in modules().items() if (what := products(tree))}
    assert {name: what for name, what in found.items() if name not in MULTIPLIERS} == {}
    assert MULTIPLIERS.keys() - found.keys() == set(), "these multiply nothing any more"


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("y = F.linear(x, w)", {"F.linear"}),
        ("y = torch.nn.functional.linear(x, w)", {"torch.nn.functional.linear"}),
        ("y = x.mm(w)", {"x.mm"}),
        ("y.addmm_(x, w)", {"y.addmm_"}),
        ("y = torch.einsum('ik,kj->ij', x, w)", {"torch.einsum"}),
        ("def f(x, w):\n    return -(x[0] @ w.t())", {"@"}),
        ("x @= w", {"@"}),
        ("from torch import bmm as times", {"bmm"}),
        ("from torch.nn.functional import linear", {"linear"}),
        ("multiply = torch.matmul", {"torch.matmul"}),
        ("from whet.models.products import linear\ny = linear(x, w)", set()),
        ("@torch.no_grad()\ndef f(head):\n    return head.linear.weight * 2", set()),
    ],
)
def test_a_product_is_seen_however_it_is_written(line: str, seen: set[str]) -> None:
    assert products(ast.parse(line)) == seen


def test_nothing_that_a_file_holds_is_unpickled_or_evaluated():
    called = {
        name: {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)} & RUNS_CODE
        for name, tree in modules().items()
    }
    assert {name: found for name, found in called.items() if found} == MAY_RUN_CODE
    renamed = {
        (name, node.module)
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module in ("pickle", "marshal", "runpy", "joblib", "shelve")
    }
    assert renamed == set()


@pytest.mark.parametrize(
    "name",
    ["whet.types", "whet.seeds", "whet.tables", "whet.environment"]
    + sorted(n for n in files() if n.startswith("whet.config.")),
)
def test_the_words_know_no_torch(name):
    """By the source: neither the module nor anything it imports from the package imports a heavy library."""
    reached, todo = set(), [name] if name in modules() else []
    while todo:
        at = todo.pop()
        reached.add(at)
        todo += graph()[at] - reached
    heavy = {"torch", "transformers", "ray", "tokenizers", "safetensors", "pyarrow", "datasets"}
    assert {
        (n, i) for n in reached for i in imports(n, modules()[n]) if i.partition(".")[0] in heavy
    } == set()


def test_the_words_load_without_torch():
    """By running them: whatever their libraries do, torch is not imported."""
    names = sorted(n for n in modules() if n.startswith("whet.config.") or layer(n) == 0)
    code = f"import sys, importlib\nfor n in {names}: importlib.import_module(n)\n"
    code += "print(sorted({'torch', 'transformers', 'ray', 'pyarrow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


LISTINGS = (
    ("--help",), ("keys", "--json"), ("keys", "--algorithms"), ("explain", "algorithm.loss"),
    ("explain", "algorithm.advantage"), ("explain", "rollout.group_size"), ("schema",), ("train", "--help"),
    ("plan", "tests/dialects/verl_64_gpus.yaml", "--gpus", "8x8"),
    ("convert", "tests/dialects/skyrl_gsm8k_ppo.yaml", "--gpus", "8"), ("convert", "examples/from_verl.sh"),
)  # fmt: skip


@pytest.mark.long
def test_what_lists_explains_plans_or_converts_needs_no_torch():
    """By running it, in one process; files for more devices than there are among it."""
    code = f"""
import sys
from typer.testing import CliRunner
from whet.cli import app
for words in {LISTINGS}:
    done = CliRunner().invoke(app, list(words))
    print(done.exit_code, sorted({{'torch', 'transformers', 'ray'}} & set(sys.modules)), words)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [f"0 [] {words}" for words in LISTINGS], done.stderr


def test_a_config_has_as_many_keys_as_one_can_know():
    """A section that stands in several places counts once, and a table of settings is one key. The sections of a stage
    are those of a run."""
    declared = {
        (
            next(c for c in reversed(key.owner.__mro__) if key.path[-1] in getattr(c, "model_fields", ())),
            key.path[-1],
        )
        for key in keys().values()
        if key.section is None and (key.owner is not StageConfig or key.path[-1] == "name")
    }
    assert len(declared) <= MOST_KEYS


def test_files_and_functions_are_short():
    long = []
    for name, tree in modules().items():
        last = max((getattr(node, "end_lineno", 0) or 0 for node in ast.walk(tree)), default=0)
        if last > MOST_LINES_OF_A_FILE:
            long.append(f"{name}: {last} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MOST_LINES_OF_A_FUNCTION:
                    long.append(f"{name}.{node.name}: {lines} lines")
    assert long == []


def test_all_modes_go_through_one_loop_that_can_be_read_at_once():
    """No other module makes a step, and the loop names no mode."""
    asked = {
        name: {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)} & STEP
        for name, tree in modules().items()
    }
    assert {name: calls for name, calls in asked.items() if calls} == {"whet.loop": STEP}
    assert len(files()["whet.loop"].read_text(encoding="utf-8").splitlines()) <= MOST_LINES_OF_THE_LOOP
    names = {node.attr for node in ast.walk(modules()["whet.loop"]) if isinstance(node, ast.Attribute)}
    assert not names & {"mode", "schedule", "max_staleness"}


def test_packages_hold_no_code_in_their_init():
    """Only a docstring, imports, `__all__` and the version: all else has a name of its own."""
    for name, tree in modules().items():
        if package_of(name) == name:
            extra = [
                n for n in tree.body if not isinstance(n, ast.Import | ast.ImportFrom | ast.Expr | ast.Assign)
            ]
            assert [ast.unparse(n)[:60] for n in extra if name != "whet"] == []


def test_a_class_name_stands_for_one_thing():
    places: dict[str, list[str]] = {}
    for name, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
