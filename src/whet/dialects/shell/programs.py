"""Programs that scripts call beside the trainer: what some of them print, and which do not matter to a launch."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence

from whet.dialects.shell.state import Doubt, State, Status
from whet.types import ConfigError

_HARMLESS = """
mkdir rmdir rm cp mv ln touch chmod chown tee cat ls echo printf pip pip3 ray sleep wget curl git apt
apt-get yum brew conda mamba module ulimit sysctl huggingface-cli hf wandb modelscope docker kill pkill
killall wait nvidia-smi npu-smi rocm-smi tail head grep awk find df du free ps top clear date pwd hostname
whoami id env printenv tput stty mount umount systemctl service redis-server redis-cli tmux screen lsof
fuser pgrep gsutil aws gcloud rsync scp tar unzip gunzip sort uniq wc sed tr cut xargs which type seq
basename dirname realpath readlink uname nproc diff cmp test true false sync hostnamectl squeue sinfo
scontrol scancel make cmake ninja pre-commit ruff black pytest sha1sum md5sum jq stat mktemp swanlab
mlflow tensorboard trap shopt
"""
HARMLESS = set(_HARMLESS.split())
"""Skipped without a word: they change neither the words of a launch nor what they mean."""
_PROBES = """
grep pgrep ps lsof fuser nvidia-smi npu-smi rocm-smi which type test cmp diff squeue curl ls df find
"""
EFFECTS = HARMLESS - set(_PROBES.split())
"""Run for what they do; they are taken to succeed. The others of HARMLESS are run to learn something."""
_MOST_COUNTED = 1_000


def status(name: str, args: Sequence[str], said: str, line: int) -> Status:
    """Of a program that is not run."""
    if name == "false":
        return 1
    if name in ("true", ":"):
        return 0
    if name.startswith("python") and re.search(r"\bimport torch_npu\b", " ".join(args)):
        return Doubt(line, said, False)  # the probe for Ascend NPUs; whet knows none
    return Doubt(line, said, True if name in EFFECTS else None)


def output(name: str, args: Sequence[str], state: State, line: int) -> str | None:
    """What a program prints, with marks where it is not known; None where nothing is known about it."""
    if name.startswith("python") and args[:1] == ["-c"] and "print" not in "".join(args):
        return ""
    made = _OUTPUTS.get(name)
    return made(args, state, line) if made else None


def joined(cwd: str, path: str) -> str:
    """A path as seen from a folder, without `..` where that can be told."""
    return posixpath.normpath(posixpath.join(cwd, path or "."))


def _operands(args: Sequence[str]) -> list[str]:
    """Without options."""
    if "--" in args:
        at = list(args).index("--")
        return [a for a in args[:at] if a[:1] != "-"] + list(args[at + 1 :])
    return [arg for arg in args if arg[:1] != "-" or arg == "-"]


def _echo(args: Sequence[str], state: State, line: int) -> str:
    args, flags = list(args), ""
    while args and re.fullmatch("-[neE]+", args[0]):
        flags += args.pop(0)[1:]
    said = " ".join(args)
    return (escaped(said) if "e" in flags else said) + "\n" * ("n" not in flags)


def escaped(text: str) -> str:
    """With \\n and the like written out."""
    known = {"n": "\n", "t": "\t", "\\": "\\", "r": "\r", '"': '"', "a": "", "e": "\x1b"}
    return re.sub(r'\\([nt\\r"ae])', lambda m: known[m[1]], text)


_DIRECTIVE = re.compile(r"%([-0+ #]*)(\*|\d{0,4})(?:\.(\d{0,3}))?([a-zA-Z%])")


def printf(args: Sequence[str], state: State, line: int) -> str:
    """printf's output, for %s %d %i %f %g %e %x %o %b %q %%."""
    if not args:
        return ""
    form, rest = escaped(args[0]), list(args[1:])
    out = []
    while True:
        before = len(rest)
        out.append(_DIRECTIVE.sub(lambda m: _directive(m, rest, state, line), form))
        if not rest or len(rest) == before:
            return "".join(out)
        state.budget.step(line)


def _directive(said: re.Match[str], rest: list[str], state: State, line: int) -> str:
    flags, width, precision, kind = said.groups()
    if kind == "%":
        return "%"
    if width == "*":
        width = rest.pop(0)[:4] if rest else ""
    value = rest.pop(0) if rest else ""
    shown = state.unknowns.shown(value)
    form = f"%{flags}{width}" + (f".{precision}" if precision is not None else "")
    try:
        if kind in "sbq":
            made = (form + "s") % (escaped(shown) if kind == "b" else shown) if width or precision else value
        elif kind in "dixXo":
            made = (form + kind.replace("i", "d")) % int(shown or "0", 0)
        elif kind in "feg":
            made = (form + kind) % float(shown or 0)
        else:
            return state.refused(line, f"printf %{kind}")
    except (ValueError, OverflowError, TypeError):
        return state.refused(line, f"printf %{kind} of `{shown[:40]}`")
    state.budget.grow(len(made), line)
    return made if made == value else state.unknowns.derived(made, [value])


def _date(args: Sequence[str], state: State, line: int) -> str:
    form = next((arg for arg in args if arg[:1] == "+"), "")
    return state.granted(
        "0" if form == "+%s" else "date", line, f"$(date {' '.join(args)})".replace(" )", ")")
    )


def _dirname(args: Sequence[str], state: State, line: int) -> str:
    return "\n".join(_of_path(posixpath.dirname, a, state) or "." for a in _operands(args))


def _basename(args: Sequence[str], state: State, line: int) -> str:
    said = _operands(args)
    if not said:
        return ""
    made = _of_path(posixpath.basename, said[0], state)
    return made.removesuffix(said[1]) if len(said) > 1 and made != said[1] else made


def _of_path(part: Callable[[str], str], path: str, state: State) -> str:
    shown = state.unknowns.shown(path)
    made = part(shown.rstrip("/") or shown)
    # a part in which nothing unknown stands is known: dirname of X/$(date) is X
    exact = part(path.rstrip("/") or path)
    if state.unknowns.shown(exact) == made:
        return exact
    return state.unknowns.derived(made, [path])


def _realpath(args: Sequence[str], state: State, line: int) -> str | None:
    said = _operands(args)
    if len(said) != 1:
        return None
    cwd, path = state.unknowns.shown(state.cwd), state.unknowns.shown(said[0])
    made = joined(cwd, path)
    return state.unknowns.derived(made, [said[0]] if path[:1] == "/" else [said[0], state.cwd])


def _seq(args: Sequence[str], state: State, line: int) -> str | None:
    try:
        said = [int(state.unknowns.shown(a)[:12]) for a in args]
    except ValueError:
        return None
    if not 1 <= len(said) <= 3 or not all(state.unknowns.firm(a) for a in args):
        return None
    first, by, last = {1: (1, 1, said[0]), 2: (said[0], 1, said[-1])}.get(len(said), tuple(said))
    if by == 0 or abs(last - first) // abs(by) > _MOST_COUNTED:
        raise ConfigError(f"line {line}: seq counts more than {_MOST_COUNTED} numbers")
    return "".join(f"{n}\n" for n in range(first, last + (1 if by > 0 else -1), by))


def _tr(args: Sequence[str], state: State, line: int) -> str | None:
    text = state.given
    if text is None:
        return None
    sets = [_characters(a) for a in args if a not in ("-d", "-s", "--")]
    shown = state.unknowns.shown(text)
    if args[:1] == ["-d"] and len(sets) == 1:
        made = "".join(c for c in shown if c not in sets[0])
    elif len(sets) == len(args) == 2 and sets[0] and sets[1]:
        to = sets[1] + sets[1][-1] * max(len(sets[0]) - len(sets[1]), 0)
        made = shown.translate(dict(zip(map(ord, sets[0]), to)))
    else:
        return None
    return state.unknowns.derived(made, [text])


def _characters(said: str) -> str:
    said = said.replace("[:upper:]", "A-Z").replace("[:lower:]", "a-z").replace("[:space:]", " \n\t")
    said = escaped(said)
    for span in ("A-Z", "a-z", "0-9"):
        said = said.replace(span, "".join(chr(c) for c in range(ord(span[0]), ord(span[2]) + 1)))
    return said


def _cut(args: Sequence[str], state: State, line: int) -> str | None:
    said = re.fullmatch(r"(?:-d ?(.)|-f ?(\d{1,3})| )+", " ".join(args)) if args else None
    by = re.search(r"-d ?(.)", " ".join(args))
    if said is None or by is None or said[2] is None or state.given is None:
        return None
    if not state.unknowns.firm(state.given):
        return None
    lines = (row.split(by[1]) for row in state.given.splitlines())
    at = int(said[2])
    return "".join((row[0] if len(row) == 1 else "".join(row[at - 1 : at])) + "\n" for row in lines)


def _same(args: Sequence[str], state: State, line: int) -> str | None:
    return state.given if not _operands(args) else None


def _tee(args: Sequence[str], state: State, line: int) -> str | None:
    return state.given


def _taken(shown: str, what: str) -> Callable[[Sequence[str], State, int], str | None]:
    return lambda args, state, line: state.granted(shown, line, what)


def _whoami(args: Sequence[str], state: State, line: int) -> str:
    return state.get("USER") or state.granted("user", line, "$(whoami)")


def _which(args: Sequence[str], state: State, line: int) -> str | None:
    said = _operands(args)
    return state.granted(said[0], line, f"the path of the program {said[0]}") if len(said) == 1 else None


def _hostname(args: Sequence[str], state: State, line: int) -> str:
    address = bool(args) and args[0] in ("-i", "-I", "--ip-address")
    return state.granted("127.0.0.1" if address else "localhost", line, f"$({' '.join(['hostname', *args])})")


def _git(args: Sequence[str], state: State, line: int) -> str | None:
    if list(args) == ["rev-parse", "--show-toplevel"]:
        return state.granted(state.unknowns.shown(state.cwd), line, "the root of the git repository")
    return None


_OUTPUTS: dict[str, Callable[[Sequence[str], State, int], str | None]] = {
    "echo": _echo,
    "printf": printf,
    "pwd": lambda args, state, line: state.cwd,
    "date": _date,
    "dirname": _dirname,
    "basename": _basename,
    "realpath": _realpath,
    "readlink": _realpath,
    "nproc": _taken("8", "$(nproc), the number of processors"),
    "whoami": _whoami,
    "hostname": _hostname,
    "mktemp": _taken("/tmp/tmp.file", "the file that mktemp makes"),
    "uname": _taken("Linux", "$(uname)"),
    "id": _taken("0", "$(id)"),
    "which": _which,
    "seq": _seq,
    "tr": _tr,
    "cut": _cut,
    "cat": _same,
    "tee": _tee,
    "git": _git,
}
for _name in ("mkdir", "cd", "true", "false", ":", "sleep", "export", "touch", "rm"):
    _OUTPUTS[_name] = lambda args, state, line: ""
