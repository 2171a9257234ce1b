"""The words of a command -> what it starts: the wrappers and launchers before the trainer, and the trainer's system."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

System = Literal["verl", "skyrl", "cosmos", "trinity", ""]

_PYTHON = re.compile(r"python[\d.]*")
_PAIR = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL | re.ASCII)
_WRAPPERS: dict[str, tuple[set[str], int]] = {
    "nohup": (set(), 0),
    "time": ({"-o", "-f"}, 0),
    "setsid": (set(), 0),
    "exec": ({"-a"}, 0),
    "stdbuf": ({"-o", "-i", "-e"}, 0),
    "unbuffer": (set(), 0),
    "nice": ({"-n"}, 0),
    "ionice": ({"-c", "-n"}, 0),
    "timeout": ({"-s", "-k", "--signal", "--kill-after"}, 1),
    "sudo": ({"-u", "-g"}, 0),
    "taskset": ({"-c"}, 0),
    "numactl": ({"-C", "-N", "-m", "-l", "-p", "-i"}, 0),
    "xvfb-run": ({"-n", "-s", "-e", "-f"}, 0),
    "env": ({"-u", "-C", "--unset", "--chdir"}, 0),
}
"""(options with a value of their own, words before the command) of what runs another command as it is."""
_TEXT_SEARCHED = """
srun mpirun mpiexec nsys ncu singularity apptainer docker podman jsrun sbatch dlrover-run
"""
_SEARCHED = set(_TEXT_SEARCHED.split())
"""Their options are many: the command begins at the first word that is a program known here."""
_RUNNERS = {"conda", "mamba", "poetry", "pipenv", "pdm", "rye", "hatch", "micromamba", "pixi"}
"""`conda run -n env command`"""
_SHELLS = {"bash", "sh", "zsh", "dash"}
_TEXT_UV_FLAGS = """
--isolated --frozen --locked --no-sync --all-extras --all-groups --all-packages --no-dev --dev --only-dev
--exact --no-project --active --no-active --offline --refresh --no-cache -n --quiet -q --verbose -v
--no-config --native-tls --no-default-groups --no-editable --reinstall --upgrade -U --no-build-isolation
--compile-bytecode --no-env-file --no-progress --no-index --no-build --no-binary --managed-python
--no-managed-python --script -s --gui-script --no-python-downloads --no-sources --inexact
"""
_UV_FLAGS = set(_TEXT_UV_FLAGS.split())
_TEXT_TORCH_FLAGS = """
--standalone --no-python --no_python --run-path --run_path --use-env --use_env
"""
_TORCH_FLAGS = set(_TEXT_TORCH_FLAGS.split())
_TEXT_ACCELERATE_FLAGS = """
--multi_gpu --multi-gpu --cpu --tpu --use_deepspeed --use_fsdp --use_megatron_lm --quiet -q --debug
--same_network --no_python --use_xpu --ipex --tpu_cluster --no_tpu_cluster --dynamo_use_dynamic
--dynamo_use_fullgraph --enable_cpu_affinity
"""
_ACCELERATE_FLAGS = set(_TEXT_ACCELERATE_FLAGS.split())
_DEEPSPEED_FLAGS = {
    "--force_multi",
    "--no_python",
    "--no_local_rank",
    "--bind_cores_to_rank",
    "--no_ssh_check",
}
_LAUNCHERS = {
    "torchrun": _TORCH_FLAGS,
    "torch.distributed.run": _TORCH_FLAGS,
    "torch.distributed.launch": _TORCH_FLAGS,
    "accelerate": _ACCELERATE_FLAGS,
    "accelerate.commands.launch": _ACCELERATE_FLAGS,
    "deepspeed": _DEEPSPEED_FLAGS,
}
"""Their options without a value; all others have one, in the next word where there is no `=`."""
_KNOWN = {
    "uv",
    "cosmos-rl",
    "trinity",
    "ray",
    "env",
    "accelerate",
    "torchrun",
    "deepspeed",
    *_SHELLS,
    *_WRAPPERS,
}
_ROOTS = ("verl", "recipe", "skyrl", "skyrl_train", "cosmos_rl", "trinity", "examples", "integrations")

_NO_TRAINERS = (
    "skyrl.train.entrypoints.serve",
    "skyrl.tinker",
    "skyrl_agent.integrations.tinker",
    "tinker_cookbook",
    "verl.model_merger",
    "verl.utils",
    "verl.tools",
)
_MODULES: tuple[tuple[System, re.Pattern[str]], ...] = (
    ("verl", re.compile(r"verl\.trainer\.(main_\w+|\w*trainer|\w+\.main\w*)")),
    ("verl", re.compile(r"verl\.experimental\.([\w.]+\.)?\w*main\w*")),
    ("verl", re.compile(r"(verl\.)?recipe\.([\w.-]+\.)?\w*(main|trainer)\w*")),
    ("skyrl", re.compile(r"skyrl(_train|\.train)\.(entrypoints\.\w+|main_\w+)")),
    ("skyrl", re.compile(r"(skyrl-train\.)?(examples|integrations)\.([\w.+-]+\.)?\w*(main_\w+|entrypoint)")),
    (
        "cosmos",
        re.compile(r"cosmos-rl|cosmos_rl\.(launcher\.launch_all|tools\.slurm\.cosmos_rl_slurm_launch)"),
    ),
    ("trinity", re.compile(r"trinity run|trinity\.cli\.launcher")),
)
_PACKAGES = {
    "verl": ("verl.", "recipe."),
    "skyrl": ("skyrl.", "skyrl_train."),
    "cosmos": ("cosmos",),
    "trinity": ("trinity",),
}
"""Beginnings of the modules whose keys the tables hold."""
_KEYS: tuple[tuple[System, re.Pattern[str]], ...] = (
    (
        "verl",
        re.compile(r"[+~]*(actor_rollout_ref|critic)\.|data\.(train|val)_files=|algorithm\.adv_estimator="),
    ),
    ("skyrl", re.compile(r"(generator|trainer\.(policy|placement|algorithm))\.|data\.(train|val)_data=")),
)
_OVERRIDE = re.compile(r"(\+\+|\+|~)?[A-Za-z_][\w.@/-]*=|~[A-Za-z_][\w.@/-]*\Z")


@dataclass(frozen=True, slots=True)
class Inside:
    """The word at `at` is a text of commands: `bash -c`."""

    at: int


@dataclass(frozen=True, slots=True)
class LaunchedProgram:
    """A program and, where it starts one, a Python module or a trainer of its own."""

    name: int
    """Which word the program is."""
    starts: bool = False
    module: str = ""
    args: int = 0
    """Where the trainer's own words begin."""
    others: tuple[int, ...] = ()
    """The words for launchers and wrappers."""
    environment: Mapping[str, str] = field(default_factory=dict)


def unwrapped(words: Sequence[str]) -> LaunchedProgram | Inside:
    """What a command starts, behind its wrappers."""
    return _Reader(words).read()


def system_of(module: str, args: Sequence[str]) -> tuple[System, bool] | None:
    """(the system, whether its module says so rather than its overrides); None for what is no trainer."""
    if module.startswith(_NO_TRAINERS):
        return None
    by_keys = next((system for system, keys in _KEYS for arg in args if keys.match(arg)), None)
    for system, modules in _MODULES:
        if modules.fullmatch(module):
            # programs below examples/ are of whichever system their overrides are of
            own = by_keys if module.startswith(("examples.", "integrations.", "recipe.")) else None
            return own or system, True
    if by_keys:
        return by_keys, False
    if len(args) > 1 and all(_OVERRIDE.match(arg) or arg.startswith("--config-") for arg in args):
        return "", False
    return None


def is_own(module: str, system: System) -> bool:
    """Whether a module that starts a trainer is part of its system. Examples and programs of yours may add keys."""
    return system == "" or module.startswith(_PACKAGES[system])


class _Reader:
    def __init__(self, words: Sequence[str]) -> None:
        self.words, self.at = words, 0
        self.others: list[int] = []
        self.environment: dict[str, str] = {}
        self.named = False
        """The word at hand is a module."""

    @property
    def here(self) -> str:
        return self.words[self.at] if self.at < len(self.words) else ""

    def read(self) -> LaunchedProgram | Inside:
        while self.at < len(self.words):
            name = self.here.rpartition("/")[2]
            if name in _SHELLS:
                return self.shell()
            if name in ("cosmos-rl", "trinity"):
                return self.own(name)
            if _PYTHON.fullmatch(name):
                return self.python()
            if name in _LAUNCHERS:
                return self.launcher(name)
            begun = self.at
            if not self.unwrap(name):
                return LaunchedProgram(begun)
            if self.named or self.here.endswith(".py"):
                return self.module(begun, self.here)
        return LaunchedProgram(0)

    def unwrap(self, name: str) -> bool:
        """Go over a wrapper and its options."""
        following = self.words[self.at + 1] if self.at + 1 < len(self.words) else ""
        if name in _WRAPPERS:
            values, operands = _WRAPPERS[name]
            self.at += 1
            self.options(lambda word: word not in values)
            while name in ("env", "sudo") and (pair := _PAIR.fullmatch(self.here)):
                self.environment[pair[1]] = pair[2]
                self.at += 1
            self.others += range(self.at, self.at + operands)
            self.at += operands
        elif name == "uv" and "run" in self.words[self.at : self.at + 6]:
            self.at = list(self.words).index("run", self.at) + 1
            return self.uv()
        elif name in _RUNNERS and following == "run":
            self.at += 2
            self.options(lambda word: word not in ("-n", "-p", "--name", "--prefix", "--cwd", "-e"))
        elif name == "ray" and following == "job":
            self.search("--" if "--" in self.words[self.at :] else "")
        elif name in _SEARCHED and not (
            name in ("docker", "podman") and {"run", "exec"}.isdisjoint(self.words)
        ):
            self.search("")
        else:
            return False
        return True

    def options(self, flag: Callable[[str], bool]) -> None:
        """Go over options; `flag` tells those that have no value in the next word."""
        while self.here[:1] == "-" and len(self.here) > 1:
            word = self.here
            self.at += 1
            if word == "--":
                return
            self.others.append(self.at - 1)
            if not flag(word) and "=" not in word:
                self.others.append(self.at)
                self.at += 1

    def search(self, mark: str) -> None:
        """Go on to the first known program, behind `mark` where there is one."""
        begun = self.at
        if mark:
            self.at = list(self.words).index(mark, self.at)
        self.at += 1
        while self.at < len(self.words) and not self.is_program():
            self.at += 1
        self.others += [n for n in range(begun + 1, self.at) if n < len(self.words) and self.words[n] != "--"]

    def is_program(self) -> bool:
        name = self.here.rpartition("/")[2]
        return name in _KNOWN or name in _RUNNERS or _PYTHON.fullmatch(name) is not None

    def uv(self) -> bool:
        """The options of `uv run`, up to the command, or to the module that -m names."""
        while self.here[:1] == "-":
            word = self.here
            self.at += 1
            if word == "--":
                break
            if word in ("-m", "--module"):
                self.named = True
                break
            self.others.append(self.at - 1)
            if word not in _UV_FLAGS and "=" not in word:
                self.others.append(self.at)
                self.at += 1
        return True

    def shell(self) -> LaunchedProgram | Inside:
        begun = self.at
        self.at += 1
        while self.here[:1] in ("-", "+") and self.here:
            word = self.here
            self.at += 1
            if word[:2] != "--" and "c" in word[1:] and self.at < len(self.words):
                return Inside(self.at)
            if word in ("-o", "-O", "+o", "--rcfile", "--init-file"):
                self.at += 1
        return LaunchedProgram(begun)

    def own(self, name: str) -> LaunchedProgram:
        begun = self.at
        self.at += 1
        if name == "trinity":
            return self.module(begun, f"trinity {self.here}", self.at + 1)
        return self.module(begun, name, self.at)

    def python(self) -> LaunchedProgram:
        begun = self.at
        self.at += 1
        while self.here[:1] == "-":
            word = self.here
            self.at += 1
            if word == "-m":
                name = self.here
                if name in _LAUNCHERS:
                    return self.launcher(name)
                return self.module(begun, name)
            if word == "-c":
                return LaunchedProgram(begun)
            self.others.append(self.at - 1)
            if word in ("-X", "-W"):
                self.others.append(self.at)
                self.at += 1
        return self.module(begun, self.here) if self.here else LaunchedProgram(begun)

    def launcher(self, name: str) -> LaunchedProgram:
        begun = self.at
        flags = _LAUNCHERS[name]
        self.at += 1
        if name == "accelerate" and self.here == "launch":
            self.at += 1
        while self.here[:1] == "-":
            word = self.here
            self.at += 1
            if word in ("-m", "--module", "--"):
                continue
            self.others.append(self.at - 1)
            if word not in flags and "=" not in word:
                self.others.append(self.at)
                self.at += 1
        return self.module(begun, self.here) if self.here else LaunchedProgram(begun)

    def module(self, begun: int, name: str, args: int | None = None) -> LaunchedProgram:
        """What is started, and where its own words begin: behind the word at hand where nothing else is said."""
        at = self.at + 1 if args is None else args
        return LaunchedProgram(begun, True, _dotted(name), at, tuple(self.others), dict(self.environment))


def _dotted(name: str) -> str:
    """A module by its dotted name, also where a path below a known root was given."""
    if not name.endswith(".py"):
        return name
    parts = name.removesuffix(".py").split("/")
    roots = [n for n, part in enumerate(parts[:-1]) if part in _ROOTS]
    return ".".join(parts[roots[0] if parts[roots[0]] != "examples" else roots[-1] :]) if roots else name
