"""What a shell script consists of, as it was written: words of parts, and commands of words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Literal:
    """Text that stands for itself."""

    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Parameter:
    """`$A` and all of `${...}`. `op` is '', 'length', 'keys', ':' (a slice) or the operator as written.

    The name of `${!A}` begins with the `!`."""

    name: str
    line: int
    quoted: bool
    op: str = ""
    index: Word | None = None
    word: Word | None = None
    other: Word | None = None
    """The replacement of `/`, the length of a slice."""


@dataclass(frozen=True, slots=True)
class Substitution:
    """`$(...)` or backticks."""

    body: tuple[Item, ...]
    source: str
    line: int
    quoted: bool


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`$((...))`, with the expansions inside it."""

    word: Word
    line: int
    quoted: bool


@dataclass(frozen=True, slots=True)
class Process:
    """`<(...)` or `>(...)`."""

    source: str
    line: int


Part = Literal | Parameter | Substitution | Arithmetic | Process


@dataclass(frozen=True, slots=True)
class Word:
    """Parts that stand together."""

    parts: tuple[Part, ...]
    line: int

    @property
    def plain(self) -> str | None:
        """The text of a word that has nothing to expand and nothing quoted."""
        if all(isinstance(part, Literal) and not part.quoted for part in self.parts):
            return "".join(part.text for part in self.parts if isinstance(part, Literal))
        return None


@dataclass(frozen=True, slots=True)
class Assign:
    """`name=value`, `name[index]+=value`, `name=(...)`; a list of (key, value) pairs for an array."""

    name: str
    line: int
    append: bool
    index: Word | None
    value: Word | tuple[tuple[Word | None, Word], ...]


@dataclass(slots=True)
class Document:
    """A here-document. Its text is read when its line ends, after the node was made."""

    ends: str
    quoted: bool
    tabs: bool
    """`<<-`: tabs at the beginning of lines go."""
    text: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True)
class Redirect:
    """`2>&1`, `> file`, `<<EOF`."""

    op: str
    fd: int | None
    target: Word | None
    document: Document | None = None


@dataclass(frozen=True, slots=True)
class Simple:
    """Assignments and a command with its words."""

    assigns: tuple[Assign, ...]
    words: tuple[Word | Assign, ...]
    redirects: tuple[Redirect, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Condition:
    """Inside `[[ ]]`: '!', '&&', '||' over conditions; a test's operator over words."""

    op: str
    parts: tuple[Condition | Word, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Test:
    """`[[ ... ]]`."""

    condition: Condition
    line: int


@dataclass(frozen=True, slots=True)
class Let:
    """`(( ... ))`."""

    word: Word
    line: int


@dataclass(frozen=True, slots=True)
class If:
    clauses: tuple[tuple[tuple[Item, ...], tuple[Item, ...]], ...]
    otherwise: tuple[Item, ...]
    line: int


@dataclass(frozen=True, slots=True)
class For:
    name: str
    words: tuple[Word, ...] | None
    """None: over `"$@"`."""
    body: tuple[Item, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Count:
    """`for ((a; b; c))`."""

    first: Word
    test: Word
    then: Word
    body: tuple[Item, ...]
    line: int


@dataclass(frozen=True, slots=True)
class While:
    condition: tuple[Item, ...]
    body: tuple[Item, ...]
    until: bool
    line: int


@dataclass(frozen=True, slots=True)
class Case:
    word: Word
    clauses: tuple[tuple[tuple[Word, ...], tuple[Item, ...], str], ...]
    """(patterns, body, how it ends: ;; ;& ;;&)"""
    line: int


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    body: Command
    line: int


@dataclass(frozen=True, slots=True)
class Group:
    """`{ ...; }`, or `( ... )`, which changes nothing outside."""

    body: tuple[Item, ...]
    apart: bool
    line: int


@dataclass(frozen=True, slots=True)
class Redirected:
    """A compound command with redirections behind it."""

    command: Command
    redirects: tuple[Redirect, ...]
    line: int


Command = Simple | Test | Let | If | For | Count | While | Case | Function | Group | Redirected


@dataclass(frozen=True, slots=True)
class Pipeline:
    commands: tuple[Command, ...]
    negated: bool
    line: int


@dataclass(frozen=True, slots=True)
class Item:
    """Pipelines joined by `&&` and `||`, up to a `;`, a line's end or a `&`."""

    first: Pipeline
    rest: tuple[tuple[str, Pipeline], ...]
    background: bool
