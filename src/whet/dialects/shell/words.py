"""Text of a shell script -> words: quoting and everything that begins with a dollar."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from whet.dialects.shell.nodes import Arithmetic, Item, Literal, Parameter, Part, Substitution, Word
from whet.types import ConfigError

MOST_DEPTH = 50
"""Of commands inside commands, and words inside words."""
META = " \t\n;&|()<>"
"""What ends a word."""
_MOST_SUM = 10_000
"""Characters of one `$((...))`."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*|[0-9@*#?$!-]")
_BRACED = re.compile(r"[A-Za-z_][A-Za-z_0-9]*|[0-9]+|[@*#?$!-]")
_PLAIN = re.compile(r"[^\\'\"$`\s;&|()<>{}/:\[\]]+")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "?": "?", "a": "\a", "b": "\b"}
_ESCAPES |= {"e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}
_CODE = re.compile(r"x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|([0-7]{1,3})")


class Words:
    """Reads words at a place of the text that moves on."""

    def __init__(self, text: str, line: int = 1, depth: int = 0) -> None:
        self.text, self.at = text, 0
        self.first, self.depth = line, depth
        self.newlines_at = [m.start() for m in re.finditer("\n", text)]

    @property
    def line(self) -> int:
        return self.first + bisect_left(self.newlines_at, self.at)

    def fail(self, problem: str, line: int | None = None) -> NoReturn:
        raise ConfigError(f"line {self.line if line is None else line}: {problem}")

    def peek(self, what: str) -> bool:
        return self.text.startswith(what, self.at)

    @property
    def here(self) -> str:
        """The next character; '' at the end."""
        return self.text[self.at : self.at + 1]

    @contextmanager
    def deeper(self) -> Iterator[None]:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            self.fail(f"commands and words nest deeper than {MOST_DEPTH}")
        yield
        self.depth -= 1

    def word(self, stop: str = META) -> Word:
        """A word, which must be there."""
        line, begun = self.line, self.at
        parts = self.parts(stop)
        if self.at == begun:
            what = (
                f"`{self.here}`" if self.here.strip() else "the end of the line" if self.here else "the end"
            )
            self.fail(f"expected a word, found {what}")
        return Word(tuple(parts), line)

    def parts(self, stop: str, quoted: bool = False) -> list[Part]:
        """What stands before one of the characters in `stop`, or before the end."""
        found: list[Part] = []
        while (here := self.here) and here not in stop:
            if here == "\\":
                self._escape(found, quoted)
            elif here == '"':
                found += self._double()
            elif here == "'" and not quoted:
                found.append(self._single())
            elif here == "$":
                found += self._dollar(quoted)
            elif here == "`":
                found.append(self._backticks(quoted))
            else:
                plain = _PLAIN.match(self.text, self.at)
                text = plain[0] if plain else here
                self.at += len(text)
                found.append(Literal(text, quoted))
        return found

    def _escape(self, found: list[Part], quoted: bool) -> None:
        after = self.text[self.at + 1 : self.at + 2]
        self.at += 2
        if after == "\n":
            return
        if quoted and after not in tuple('$`"\\}'):
            found.append(Literal("\\" + after, True))
        else:
            found.append(Literal(after or "\\", True))

    def _single(self) -> Literal:
        line, end = self.line, self.text.find("'", self.at + 1)
        if end < 0:
            self.fail("the quote ' is not closed", line)
        text = self.text[self.at + 1 : end]
        self.at = end + 1
        return Literal(text, True)

    def _double(self) -> list[Part]:
        line = self.line
        self.at += 1
        parts = self.parts_in_quotes('"')
        if not self.here:
            self.fail('the quote " is not closed', line)
        self.at += 1
        return parts or [Literal("", True)]

    def parts_in_quotes(self, stop: str) -> list[Part]:
        with self.deeper():
            return self.parts(stop, quoted=True)

    def _ansi(self) -> Literal:
        """$'...'"""
        line, out = self.line, []
        self.at += 2
        while (here := self.here) != "'":
            if not here:
                self.fail("the quote $' is not closed", line)
            self.at += 1
            if here != "\\":
                out.append(here)
            elif code := _CODE.match(self.text, self.at):
                self.at = code.end()
                number = int(code[4], 8) & 255 if code[4] else int(code[1] or code[2] or code[3], 16)
                out.append(chr(min(number, 0xFFFF)))
            else:
                out.append(_ESCAPES.get(self.here, "\\" + self.here))
                self.at += 1
        self.at += 1
        return Literal("".join(out), True)

    def _backticks(self, quoted: bool) -> Substitution:
        line, out = self.line, []
        self.at += 1
        while (here := self.here) != "`":
            if not here:
                self.fail("the backtick ` is not closed", line)
            if here == "\\" and self.text[self.at + 1 : self.at + 2] in tuple("`\\$"):
                self.at += 1
                here = self.here
            out.append(here)
            self.at += 1
        self.at += 1
        source = "".join(out)
        return Substitution(self.parse(source, line), source, line, quoted)

    def _dollar(self, quoted: bool) -> list[Part]:
        line = self.line
        if self.peek("$'") and not quoted:
            return [self._ansi()]
        if self.peek('$"') and not quoted:
            self.at += 1
            return self._double()
        if self.peek("$(("):
            word = self.arithmetic(self.at + 3)
            if word is not None:
                return [Arithmetic(word, line, quoted)]
        if self.peek("$("):
            return [self._substitution(quoted)]
        if self.peek("${"):
            with self.deeper():
                return [self._braced(quoted)]
        name = _NAME.match(self.text, self.at + 1)
        if name is None:
            self.at += 1
            return [Literal("$", quoted)]
        self.at = name.end()
        return [Parameter(name[0], line, quoted)]

    def arithmetic(self, begin: int) -> Word | None:
        """What stands up to `))`; None (and nothing read) where the parentheses are those of commands."""
        level, line = 0, self.line
        for at in range(begin, min(begin + _MOST_SUM, len(self.text))):
            here = self.text[at]
            if here == "(":
                level += 1
            elif here == ")" and level:
                level -= 1
            elif here == ")":
                if self.text[at + 1 : at + 2] != ")":
                    return None
                self.at = at + 2
                inner = self.again(self.text[begin:at], line)
                return Word(tuple(inner.parts("", quoted=True)), line)
        return None

    def _substitution(self, quoted: bool) -> Substitution:
        line = self.line
        self.at += 2
        begun = self.at
        body = self.until_closed(line)
        source = self.text[begun : self.at].strip()
        self.at += 1
        return Substitution(body, source, line, quoted)

    def _braced(self, quoted: bool) -> Parameter:
        line = self.line
        self.at += 2
        op, indirect = "", False
        if self.here == "#" and self.text[self.at + 1 : self.at + 2] not in tuple("}:-=+?#%/"):
            op, self.at = "length", self.at + 1
        elif self.here == "!" and self.text[self.at + 1 : self.at + 2] not in tuple("}:-=+?"):
            indirect, self.at = True, self.at + 1
        name = _BRACED.match(self.text, self.at)
        if name is None:
            self.fail(f"${{{self.text[self.at : self.at + 20]}: expected the name of a variable")
        self.at = name.end()
        index = self._index()
        if indirect and index is not None and index.plain in ("@", "*"):
            op, indirect = "keys", False
        word = other = None
        if not op and self.here not in ("}", ""):
            op, word, other = self._operation(quoted)
        if self.here != "}":
            self.fail(f"${{{name[0]}...}}: expected }} or an operator, found {self.here or 'the end'}", line)
        self.at += 1
        return Parameter("!" * indirect + name[0], line, quoted, op, index, word, other)

    def _index(self) -> Word | None:
        if self.here != "[":
            return None
        self.at += 1
        word = Word(tuple(self.parts("]")), self.line)
        if self.here != "]":
            self.fail("the index [ is not closed")
        self.at += 1
        return word

    def _operation(self, quoted: bool) -> tuple[str, Word | None, Word | None]:
        """The operator inside ${name...} and the words behind it."""
        line = self.line
        for op in (":-", ":=", ":+", ":?", "##", "%%", "//", "/#", "/%", "^^", ",,", *"-=+?#%/^,:@"):
            if self.peek(op):
                break
        else:
            self.fail(f"${{...}}: the operator {self.here!r} is not understood")
        self.at += len(op)
        if op[-1] in "-=+?" and op not in ("@",):
            return op, Word(tuple(self.parts("}", quoted)), line), None
        if op == ":":
            first = Word(tuple(self.parts(":}", quoted)), line)
            self.at += self.here == ":"
            length = Word(tuple(self.parts("}", quoted)), line)
            return op, first, length if length.parts else None
        # quotes inside a pattern quote, whether or not the whole stands in double quotes
        word = Word(tuple(self.parts("/}" if op[0] == "/" else "}")), line)
        other = None
        if op[0] == "/" and self.here == "/":
            self.at += 1
            other = Word(tuple(self.parts("}")), line)
        return op, word, other

    # the grammar of commands fills these in

    def again(self, text: str, line: int) -> Words:
        raise NotImplementedError

    def parse(self, text: str, line: int) -> tuple[Item, ...]:
        raise NotImplementedError

    def until_closed(self, line: int) -> tuple[Item, ...]:
        raise NotImplementedError
