"""Text of a shell script -> commands, by recursive descent. Nothing is run here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn

from whet.dialects.shell.nodes import (
    Assign,
    Case,
    Command,
    Condition,
    Count,
    Document,
    For,
    Function,
    Group,
    If,
    Item,
    Let,
    Literal,
    Pipeline,
    Process,
    Redirect,
    Redirected,
    Simple,
    Test,
    While,
    Word,
)
from whet.dialects.shell.words import META, Words

DECLARES = {"export", "declare", "typeset", "local", "readonly"}
_RESERVED = re.compile(r"[a-z]+(?=[\s;&|()<>]|\Z)|\{(?=\s|\Z)|\}(?=[\s;&|()<>]|\Z)|!(?=\s)|\[\[(?=\s)")
_INNER = {"then", "else", "elif", "fi", "do", "done", "esac", "}", "in"}
_FUNCTION = re.compile(r"(?:function[ \t]+([\w:.+-]+)[ \t]*(?:\([ \t]*\))?|([\w:.+-]+)[ \t]*\([ \t]*\))")
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?=|\[)", re.ASCII)
_REDIRECT = re.compile(r"(\d{1,3})?(<<<|<<-|<<|<&|<>|>>|>&|>\||<(?!\()|>(?!\())|(&>>|&>)")
_BLANKS = re.compile(r"(?:[ \t\r]|\\\n)*(?:#[^\n]*)?")
_UNARY = re.compile(r"-[a-zA-Z](?=\s)")
_BINARY = re.compile(r"==|!=|=~|=|<|>|-(?:eq|ne|lt|le|gt|ge|nt|ot|ef)(?=\s)")


def parse(text: str, line: int = 1, depth: int = 0) -> tuple[Item, ...]:
    """The commands of a script. `line` is the number of its first line, `depth` how deep it stands in others."""
    return Grammar(text, line, depth).script()


class Grammar(Words):
    """Reads commands."""

    def __init__(self, text: str, line: int = 1, depth: int = 0) -> None:
        super().__init__(text, line, depth)
        self.waiting: list[Document] = []

    def script(self) -> tuple[Item, ...]:
        items = self.items("")
        self._documents()
        return items

    def again(self, text: str, line: int) -> Grammar:
        return Grammar(text, line, self.depth + 1)

    def parse(self, text: str, line: int) -> tuple[Item, ...]:
        with self.deeper():
            return parse(text, line, self.depth)

    def until_closed(self, line: int) -> tuple[Item, ...]:
        with self.deeper():
            return self.items(")", opened=("(", line))

    # ---------------------------------------------------------------- what stands between commands

    def blanks(self) -> None:
        found = _BLANKS.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def lines(self) -> None:
        """Go over blanks, comments and the ends of lines."""
        self.blanks()
        while self.here == "\n":
            self.at += 1
            self._documents()
            self.blanks()

    def _documents(self) -> None:
        """The text of the here-documents that the line that just ended began."""
        for document in self.waiting:
            document.line, lines = self.line, []
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self.at = end + 1
                line = line.lstrip("\t") if document.tabs else line
                if line == document.ends:
                    break
                lines.append(line + "\n")
            document.text = "".join(lines)
        self.waiting = []
        self.at = min(self.at, len(self.text))

    def reserved(self) -> str:
        """The reserved word that stands here; '' for any other."""
        found = _RESERVED.match(self.text, self.at)
        return found[0] if found else ""

    def expect(self, what: str, opened: tuple[str, int]) -> None:
        self.lines()
        plain = what in ("(", ")", ";;")
        if not (self.peek(what) if plain else self.reserved() == what):
            self._missing(what, opened)
        self.at += len(what)

    def _missing(self, what: str, opened: tuple[str, int]) -> NoReturn:
        found = self.reserved() or self.here
        said = f"found `{found}`" if found.strip() else "found the end of the text"
        self.fail(f"expected `{what}` for the `{opened[0]}` in line {opened[1]}, {said}")

    def items(self, *ends: str, opened: tuple[str, int] = ("", 0)) -> tuple[Item, ...]:
        """Commands up to one of the words `ends`, which is left standing; '' is the end of the text."""
        found: list[Item] = []
        while True:
            self.lines()
            if self._over(ends, opened):
                return tuple(found)
            first = self.pipeline()
            rest = []
            self.blanks()
            while self.peek("&&") or self.peek("||"):
                op = self.text[self.at : self.at + 2]
                self.at += 2
                self.lines()
                rest.append((op, self.pipeline()))
                self.blanks()
            background = self.here == "&"
            if background or (self.here == ";" and not self.peek(";;") and not self.peek(";&")):
                self.at += 1
            elif self.here and self.here != "\n" and not self._over(ends, opened):
                self.fail(f"`{self.here}` is not expected here")
            found.append(Item(first, tuple(rest), background))

    def _over(self, ends: tuple[str, ...], opened: tuple[str, int]) -> bool:
        if not self.here:
            if "" not in ends:
                self._missing(ends[0], opened)
            return True
        if self.here == ")" or self.peek(";;") or self.peek(";&"):
            if (")" if self.here == ")" else ";;") not in ends:
                self.fail(f"`{self.here}` is not expected here")
            return True
        word = self.reserved()
        if word in _INNER and word not in ends and word != "in":
            self.fail(f"`{word}` is not expected here")
        return word != "" and word in ends

    def pipeline(self) -> Pipeline:
        line, negated = self.line, False
        while self.reserved() in ("!", "time"):
            negated ^= self.here == "!"
            self.at += len(self.reserved())
            self.blanks()
            if self.peek("-p "):
                self.at += 3
                self.blanks()
        commands = [self.command()]
        self.blanks()
        while self.here == "|" and not self.peek("||"):
            self.at += 2 if self.peek("|&") else 1
            self.lines()
            commands.append(self.command())
            self.blanks()
        return Pipeline(tuple(commands), negated, line)

    # ---------------------------------------------------------------- commands

    def command(self) -> Command:
        with self.deeper():
            line = self.line
            made = self._compound(self.reserved(), line)
            if made is None:
                return self._function(line) or self.simple()
            redirects = []
            self.blanks()
            while redirect := self.redirect():
                redirects.append(redirect)
                self.blanks()
            return Redirected(made, tuple(redirects), line) if redirects else made

    def _compound(self, word: str, line: int) -> Command | None:
        if self.peek("(("):
            begun = self.at
            inner = self.arithmetic(self.at + 2)
            if inner is not None:
                return Let(inner, line)
            self.at = begun
        if self.here == "(":
            self.at += 1
            body = self.items(")", opened=("(", line))
            self.at += 1
            return Group(body, True, line)
        if word in ("select", "coproc"):
            self.fail(f"`{word}` is not understood")
        made = {"if": self._if, "for": self._for, "while": self._while, "until": self._while}
        made |= {"case": self._case, "{": self._group, "[[": self._test}
        if word not in made:
            return None
        self.at += len(word)
        return made[word](line)

    def _group(self, line: int) -> Command:
        body = self.items("}", opened=("{", line))
        self.at += 1
        return Group(body, False, line)

    def _if(self, line: int) -> Command:
        opened = ("if", line)
        clauses, more = [], True
        otherwise: tuple[Item, ...] = ()
        while more:
            condition = self.items("then", opened=opened)
            self.expect("then", opened)
            body = self.items("fi", "else", "elif", opened=opened)
            clauses.append((condition, body))
            more = self.reserved() == "elif"
            self.at += 4 * more
        if self.reserved() == "else":
            self.at += 4
            otherwise = self.items("fi", opened=opened)
        self.expect("fi", opened)
        return If(tuple(clauses), otherwise, line)

    def _while(self, line: int) -> Command:
        until = self.text[self.at - 5 : self.at] == "until"
        opened = ("until" if until else "while", line)
        condition = self.items("do", opened=opened)
        return While(condition, self._do(opened), until, line)

    def _do(self, opened: tuple[str, int]) -> tuple[Item, ...]:
        self.expect("do", opened)
        body = self.items("done", opened=opened)
        self.expect("done", opened)
        return body

    def _for(self, line: int) -> Command:
        opened = ("for", line)
        self.blanks()
        if self.peek("(("):
            return self._count(opened)
        name = self.word().plain
        if name is None:
            self.fail("`for` wants the name of a variable")
        self.lines()
        words = None
        if self.reserved() == "in":
            self.at += 2
            found = []
            self.blanks()
            while self.here and self.here not in "\n;":
                found.append(self.word())
                self.blanks()
            words = tuple(found)
        if self.here == ";":
            self.at += 1
        return For(name, words, self._do(opened), line)

    def _count(self, opened: tuple[str, int]) -> Command:
        begun = self.at + 2
        if self.arithmetic(begun) is None:
            self.fail("`for ((` is not closed")
        parts = self.text[begun : self.at - 2].split(";")
        if len(parts) != 3:
            self.fail("`for ((first; test; then))` wants three parts")
        first, test, then = (
            Word(tuple(self.again(part, opened[1]).parts("", quoted=True)), opened[1]) for part in parts
        )
        self.blanks()
        if self.here == ";":
            self.at += 1
        return Count(first, test, then, self._do(opened), opened[1])

    def _case(self, line: int) -> Command:
        opened = ("case", line)
        self.blanks()
        word, clauses = self.word(), []
        self.expect("in", opened)
        self.lines()
        while self.reserved() != "esac":
            if self.here == "(":
                self.at += 1
                self.blanks()
            patterns = [self.word()]
            self.blanks()
            while self.here == "|":
                self.at += 1
                self.blanks()
                patterns.append(self.word())
                self.blanks()
            self.expect(")", opened)
            body = self.items(";;", "esac", opened=opened)
            end = next((e for e in (";;&", ";;", ";&") if self.peek(e)), "")
            self.at += len(end)
            clauses.append((tuple(patterns), body, end))
            self.lines()
        self.at += 4
        return Case(word, tuple(clauses), line)

    def _function(self, line: int) -> Command | None:
        found = _FUNCTION.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        self.lines()
        body = self._compound(self.reserved(), self.line)
        if body is None:
            self.fail(f"the function {found[1] or found[2]} wants a body in braces")
        return Function(found[1] or found[2], body, line)

    # ---------------------------------------------------------------- [[ ... ]]

    def _test(self, line: int) -> Command:
        condition = self._either()
        self.lines()
        if not self.peek("]]"):
            self._missing("]]", ("[[", line))
        self.at += 2
        return Test(condition, line)

    def _either(self) -> Condition:
        return self._joined("||", lambda: self._joined("&&", self._one))

    def _joined(self, op: str, inner: Callable[[], Condition]) -> Condition:
        parts = [inner()]
        self.lines()
        while self.peek(op):
            self.at += 2
            parts.append(inner())
            self.lines()
        return parts[0] if len(parts) == 1 else Condition(op, tuple(parts), self.line)

    def _one(self) -> Condition:
        self.lines()
        line = self.line
        if self.reserved() == "!":
            self.at += 1
            with self.deeper():
                return Condition("!", (self._one(),), line)
        if self.here == "(":
            self.at += 1
            with self.deeper():
                inner = self._either()
            self.expect(")", ("(", line))
            return inner
        if unary := _UNARY.match(self.text, self.at):
            self.at = unary.end()
            self.blanks()
            return Condition(unary[0], (self.word(),), line)
        left = self.word()
        self.blanks()
        binary = _BINARY.match(self.text, self.at)
        if binary is None:
            return Condition("-n", (left,), line)
        self.at = binary.end()
        self.blanks()
        right = self.word(" \t\n" if binary[0] == "=~" else META)
        return Condition(binary[0], (left, right), line)

    # ---------------------------------------------------------------- simple commands

    def simple(self) -> Simple:
        line = self.line
        assigns: list[Assign] = []
        words: list[Word | Assign] = []
        redirects: list[Redirect] = []
        while True:
            self.blanks()
            if redirect := self.redirect():
                redirects.append(redirect)
                continue
            if not self.here or self.here in "\n;&|)":
                break
            if self.here in "<>":
                words.append(self._process())
                continue
            if self.here == "(":
                self.fail("`(` is not expected here; quote it if it is text")
            declares = bool(words) and isinstance(words[0], Word) and words[0].plain in DECLARES
            made = self.assign() if declares or not words else None
            if made is None:
                words.append(self.word())
            elif words:
                words.append(made)
            else:
                assigns.append(made)
        if not (assigns or words or redirects):
            self.fail(f"expected a command, found {self.here or 'the end'!r}")
        return Simple(tuple(assigns), tuple(words), tuple(redirects), line)

    def _process(self) -> Word:
        line, begun = self.line, self.at
        self.at += 2
        self.until_closed(line)
        self.at += 1
        return Word((Process(self.text[begun : self.at], line),), line)

    def assign(self) -> Assign | None:
        found = _ASSIGN.match(self.text, self.at)
        if found is None:
            return None
        begun, line, index, op = self.at, self.line, None, found[2]
        self.at = found.end()
        if op == "[":
            self.at -= 1
            index = self._index()
            op = "+=" if self.peek("+=") else "="
            if not self.peek(op):
                self.at = begun
                return None
            self.at += len(op)
        value: Word | tuple[tuple[Word | None, Word], ...]
        if self.here == "(" and index is None:
            value = self._elements(line)
        else:
            value = Word(tuple(self.parts(META)), self.line)
        return Assign(found[1], line, op == "+=", index, value)

    def _elements(self, line: int) -> tuple[tuple[Word | None, Word], ...]:
        found: list[tuple[Word | None, Word]] = []
        self.at += 1
        self.lines()
        while self.here != ")":
            if not self.here:
                self._missing(")", ("(", line))
            key, begun = None, self.at
            if self.here == "[":
                key = self._key()
                self.at = begun if key is None else self.at
            if key is not None:
                found.append((key, Word(tuple(self.parts(META)), self.line)))
            else:
                found.append((None, self._process() if self.here in "<>" else self.word()))
            self.lines()
        self.at += 1
        return tuple(found)

    def _key(self) -> Word | None:
        """`[key]=` of an array's element; None for any other word that begins with a bracket."""
        self.at += 1
        key = Word(tuple(self.parts("]" + META)), self.line)
        if not self.peek("]="):
            return None
        self.at += 2
        return key

    def redirect(self) -> Redirect | None:
        found = _REDIRECT.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        op, fd = found[2] or found[3], int(found[1]) if found[1] else None
        self.blanks()
        if op not in ("<<", "<<-"):
            return Redirect(op, fd, self._process() if self.here in tuple("<>") else self.word())
        word = self.word()
        ends = "".join(part.text for part in word.parts if isinstance(part, Literal))
        quoted = any(isinstance(part, Literal) and part.quoted for part in word.parts)
        document = Document(ends, quoted, op == "<<-")
        self.waiting.append(document)
        return Redirect(op, fd, None, document)
