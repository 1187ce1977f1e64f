r"""Grammars that callers write: the EBNF of llama.cpp and xgrammar (GBNF), or Lark. Both become llguidance's Lark.

    root ::= "yes" | "no" ws number{1,3}        start: "yes" | "no" _WS NUMBER~1..3
    ws ::= [ \t]*                               _WS: /[ \t]*/

A grammar is parsed completely and written again from the result, so it can't contain other features of the library's
Lark, such as schemas, special tokens or limits of a rule. The work that it causes is bounded before the library gets
it.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from gpulease.client.decode.decode_errors import GrammarRefused
from gpulease.client.decode.text.grammar import MAX_EXPANDED_ITEMS, MAX_GRAMMAR_BYTES, expanded_items, string_literal
from gpulease.client.texts import quoted

MAX_DEFINITIONS: Final = 512
"""Maximum number of rules and terminals. The time to show that each of them has an end grows with their number."""

MAX_DEPTH: Final = 64
"""Maximum depth of nested groups."""

MAX_STACKED: Final = 4
"""Maximum number of repetition marks directly after one another. Each nests the part one level deeper, like a group.
"""

MAX_COUNT: Final = 1_000_000
"""Highest number of repetitions."""

MAX_LEXEME: Final = 128
"""Most characters that one lexeme may require, in a grammar without a limit to the length of its texts.

Where only one text can follow, the library computes all of it for a mask, up to as many lexemes as its limits allow.
With lexemes of this length, that is about 10^6 characters, which take a second or two.
"""

COMMON_CHARACTERS: Final = 100
"""The count for one of Lark's common terminals, such as the one for numbers."""

_IS_EBNF: Final = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
_EBNF_NAME: Final = re.compile(r"(?P<name>[A-Za-z0-9_-]+)[ \t]*::=")
_LARK_NAME: Final = re.compile(r"[?!]*(?P<name>[A-Za-z_][A-Za-z0-9_]*)[ \t]*:(?!:)")
"""How a definition begins, at the start of a line."""

_SPACE: Final = re.compile(r"(?:\s+|(?:#|//)[^\n]*)+")

_TOKENS: Final = r"""
    (?P<string>"(?:\\.|[^"\\\n])*")
    | (?P<count>\{\s*(?:(?P<least>\d+)\s*)?(?P<comma>,\s*(?:(?P<most>\d+)\s*)?)?\})
    | (?P<name>[A-Za-z0-9_][A-Za-z0-9_-]*)
    | (?P<mark>[|()*+?])
"""
_EBNF_TOKEN: Final = re.compile(r"(?P<set>\[(?:\\.|[^\]\\\n])+\]) | (?P<any>\.) |" + _TOKENS, re.VERBOSE)
_LARK_TOKEN: Final = re.compile(
    r"""
    (?P<regex>/(?!/)(?:\\.|[^/\\\n])+/)(?P<flags>[a-z]*)
    | (?P<times>~\s*(?P<from>\d+)(?:\s*\.\.\s*(?P<to>\d+))?)
    | (?P<alias>->\s*\w+)
    | (?P<range>\.\.)
    | (?P<import>%import\s+common\.(?P<common>[A-Z_]+)(?=\s|$))
    | (?P<ignore>%ignore\b)
    | (?P<option>[\[\]])
    |"""
    + _TOKENS,
    re.VERBOSE,
)

_CHARACTER: Final = re.compile(
    r"\\(?:x(?P<x>[0-9A-Fa-f]{2})|u(?P<u>[0-9A-Fa-f]{4})|U(?P<U>[0-9A-Fa-f]{8})|(?P<escaped>.))|[^\\]", re.DOTALL
)
"""A character of a string or a set, as it is or escaped."""

_ESCAPED: Final[Mapping[str, str]] = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b", "v": "\v", "0": "\0"}
"""Characters that mean another character after a backslash."""

_MARKS: Final[Mapping[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
"""Repetitions that are marks."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """A literal, a set of characters or a regular expression, in llguidance's Lark.

    Attributes:
        written: Its text.
        most: The number of its characters, with repetitions written out.
        least: The same with the fewest repetitions. From any beginning of the lexeme, its end is at most that far.
    """

    written: str
    most: float
    least: float


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to a rule or a terminal, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Series:
    """Parts in sequence; without any, the empty text."""

    parts: "tuple[Part, ...]"


@dataclass(frozen=True, slots=True)
class Choice:
    """Alternatives: exactly one of the parts is taken."""

    parts: "tuple[Part, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part, `least` to `most` times; None for any number."""

    part: "Part"
    least: int
    most: int | None


Part = Terminal | Reference | Series | Choice | Repeat


def lark_of(text: str) -> str:
    """Return a grammar as llguidance's Lark, with `start` as the rule of a whole answer.

    The syntax is EBNF if a line begins with `name ::=`; its first rule is `root`. Otherwise it is Lark. Raises
    GrammarRefused for a grammar that is wrong, that uses more of Lark than rules, terminals, `%import common.NAME` and
    `%ignore`, or that takes too much work.
    """
    if len(text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise GrammarRefused(f"a grammar must have at most {MAX_GRAMMAR_BYTES:,} bytes")
    return _Grammar(_GrammarReader(text)).lark()


class _GrammarReader:
    """Reads a grammar.

    Attributes:
        is_ebnf: Whether it is written in EBNF.
        definitions: The part that each name stands for.
        imports: The names of Lark's common terminals that it uses.
        ignored: The parts that may come between any two lexemes.
    """

    def __init__(self, text: str) -> None:
        self._text, self._place, self._depth = text, 0, 0
        self.is_ebnf = _IS_EBNF.search(text) is not None
        self._name, self._tokens = (_EBNF_NAME, _EBNF_TOKEN) if self.is_ebnf else (_LARK_NAME, _LARK_TOKEN)
        self.definitions: dict[str, Part] = {}
        self.imports: list[str] = []
        self.ignored: list[Part] = []
        while True:
            self._skip()
            if self._place == len(text):
                return
            if definition := self._definition():
                self._define(definition)
            elif token := self._taken("import"):
                self.imports.append(token["common"])
            elif self._taken("ignore"):
                self.ignored.append(self._choice())
            else:
                raise self._wrong("the definition of a rule must be here")

    def _define(self, definition: re.Match[str]) -> None:
        self._place, name = definition.end(), definition["name"]
        if name in self.definitions:
            raise self._wrong(f"{quoted(name)} is defined twice")
        if len(self.definitions) == MAX_DEFINITIONS:
            raise self._wrong(f"it has more than {MAX_DEFINITIONS} rules and terminals")
        self.definitions[name] = self._choice()

    # --- parts, from the outermost ---

    def _choice(self) -> Part:
        parts = [self._series()]
        while self._taken_mark("|"):
            parts.append(self._series())
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _series(self) -> Part:
        parts: list[Part] = []
        while (part := self._item()) is not None:
            parts.append(part)
        # In Lark, an alternative may have an alias, which names a node of the syntax tree. Ignore it, because no tree
        # is built here.
        self._taken("alias")
        return parts[0] if len(parts) == 1 else Series(tuple(parts))

    def _item(self) -> Part | None:
        """Read a part with its repetitions; None if none begins here."""
        part, stacked = self._atom(), 0
        while part is not None and (bounds := self._bounds()) is not None:
            stacked += 1
            if stacked > MAX_STACKED:
                raise self._wrong(f"more than {MAX_STACKED} repetitions are right behind one another")
            least, most = bounds
            if most is not None and most < least:
                raise self._wrong("the most repetitions must not be fewer than the least")
            part = Series(()) if most == 0 else Repeat(part, least, most)
        return part

    def _atom(self) -> Part | None:
        if self._taken_mark("("):
            return self._group(lambda: self._taken_mark(")"))
        if self._is_next("option", "["):
            self._taken("option")
            return Repeat(self._group(lambda: self._is_next("option", "]") and bool(self._taken("option"))), 0, 1)
        if token := self._taken("string"):
            return self._literal(self._unescaped(token["string"][1:-1]))
        if self._taken("any"):
            return Terminal("/(?s:.)/", 1, 1)
        if token := self._taken("set"):
            return self._set(token["set"][1:-1])
        if token := self._taken("regex"):
            return self._regex(token["regex"], token["flags"])
        if token := self._taken("name"):
            return Reference(token["name"])
        return None

    def _group(self, ends: Callable[[], bool]) -> Part:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._wrong(f"more than {MAX_DEPTH} groups are in one another")
        part = self._choice()
        self._depth -= 1
        if not ends():
            raise self._wrong("a group must end here")
        return part

    def _bounds(self) -> tuple[int, int | None] | None:
        """Read how often a part is repeated: least and most, None for no upper bound. None if no repetition is next."""
        for mark, bounds in _MARKS.items():
            if self._taken_mark(mark):
                return bounds
        if token := self._taken("count"):
            least = self._number(token["least"] or "0")
            if token["comma"] is None:
                return least, least
            return least, None if token["most"] is None else self._number(token["most"])
        if token := self._taken("times"):
            least = self._number(token["from"])
            return least, least if token["to"] is None else self._number(token["to"])
        return None

    def _number(self, digits: str) -> int:
        if len(digits) > len(str(MAX_COUNT)):
            raise self._wrong(f"repetitions must be at most {MAX_COUNT:,}")
        return int(digits)

    def _literal(self, text: str) -> Part:
        # In Lark, an i directly after a string means that case does not matter. Looking for a range skips spaces.
        flag = "i" if not self.is_ebnf and self._text.startswith("i", self._place) else ""
        self._place += len(flag)
        if not flag and self._taken("range"):
            token = self._taken("string")
            last = "" if token is None else self._unescaped(token["string"][1:-1])
            if len(text) != 1 or len(last) != 1 or text > last:
                raise self._wrong("a range must be from one character to a later one")
            return Terminal(f"/[{_hex(text)}-{_hex(last)}]/", 1, 1)
        return Terminal(string_literal(text) + flag, len(text), len(text)) if text else Series(())

    def _set(self, text: str) -> Part:
        """Return a set of characters in EBNF as a set in a regular expression."""
        sign, text = ("^", text[1:]) if text.startswith("^") else ("", text)
        # Pairs of a character and whether it was escaped: an escaped - does not make a range.
        characters = [(self._character(match), match[0][0] == "\\") for match in _CHARACTER.finditer(text)]
        written, place = "", 0
        while place < len(characters):
            first, last = characters[place][0], characters[place][0]
            if place + 2 < len(characters) and characters[place + 1] == ("-", False):
                place, last = place + 2, characters[place + 2][0]
            if first > last:
                raise self._wrong("a range must be from one character to a later one")
            written += _hex(first) if first == last else f"{_hex(first)}-{_hex(last)}"
            place += 1
        if not written:
            raise self._wrong("a set must have a character")
        return Terminal(f"/[{sign}{written}]/", 1, 1)

    def _regex(self, regex: str, flags: str) -> Part:
        if not set(flags) <= {"i", "s"}:
            raise self._wrong("a regular expression may have the flags i and s alone")
        body = regex[1:-1]
        return Terminal(regex + flags, expanded_items(body), expanded_items(body, is_least=True))

    def _unescaped(self, text: str) -> str:
        return "".join(map(self._character, _CHARACTER.finditer(text)))

    def _character(self, match: re.Match[str]) -> str:
        digits, escaped = match["x"] or match["u"] or match["U"], match["escaped"]
        if digits is not None:
            number = int(digits, 16)
            if number > 0x10FFFF:
                raise self._wrong("an escape must be that of a character")
            character = chr(number)
        elif escaped is not None:
            character = _ESCAPED.get(escaped, escaped)
            if escaped.isalnum() and escaped not in _ESCAPED:
                raise self._wrong(f"the escape \\{escaped} is not known")
        else:
            character = match[0]
        if "\ud800" <= character <= "\udfff":
            raise self._wrong("surrogates are not characters")
        return character

    # --- tokens ---

    def _skip(self) -> None:
        if space := _SPACE.match(self._text, self._place):
            self._place = space.end()

    def _definition(self) -> re.Match[str] | None:
        """Return the beginning of a definition if there is one here, at the beginning of a line; otherwise None."""
        match = self._name.match(self._text, self._place)
        # Search the line only after a name: a search for each token would take quadratic time for a long line.
        if match is None or self._text[self._text.rfind("\n", 0, self._place) + 1 : self._place].strip():
            return None
        return match

    def _next(self) -> re.Match[str] | None:
        """Return the next token; None before a definition and at the end. Raises GrammarRefused for anything else."""
        self._skip()
        if self._place == len(self._text) or self._definition():
            return None
        token = self._tokens.match(self._text, self._place)
        if token is None:
            raise self._wrong("this is not supported")
        return token

    def _is_next(self, kind: str, mark: str) -> bool:
        token = self._next()
        return token is not None and kind in token.re.groupindex and token[kind] == mark

    def _taken(self, kind: str) -> re.Match[str] | None:
        """Consume the next token and return its match if it is of this kind; else return None."""
        token = self._next()
        # Each of the two syntaxes has kinds of tokens that the other lacks.
        if token is None or kind not in token.re.groupindex or token[kind] is None:
            return None
        self._place = token.end()
        return token

    def _taken_mark(self, mark: str) -> bool:
        return self._is_next("mark", mark) and self._taken("mark") is not None

    def _wrong(self, problem: str) -> GrammarRefused:
        line = self._text.count("\n", 0, self._place) + 1
        return GrammarRefused(
            f"the grammar, line {line}, at {quoted(self._text[self._place : self._place + 40])}: {problem}"
        )


class _Grammar:
    """A grammar that was read: which names are terminals, how much work it takes, and its text in Lark."""

    def __init__(self, reader: _GrammarReader) -> None:
        self._parts, self._imports, self._ignored = dict(reader.definitions), reader.imports, reader.ignored
        self._root = "root" if reader.is_ebnf else "start"
        self._check_names()
        self._terminals = self._regular() if reader.is_ebnf else {name for name in self._parts if _is_terminal(name)}
        self._check_terminals()
        self._check_ends()
        self._check_work()

    def lark(self) -> str:
        """Return the grammar as llguidance's Lark. Names become numbers, because in EBNF they may be any text."""
        numbered = {
            name: f"T{place}" if name in self._terminals else f"r{place}" for place, name in enumerate(self._parts)
        }
        names = numbered | {name: name for name in self._imports}
        lines = [f"%import common.{name}" for name in sorted(set(self._imports))]
        lines += [f"%ignore {_written(part, names)}" for part in self._ignored]
        # The rule `start` refers to the grammar's root rule, because other rules may refer to the root as well.
        lines.append(f"start: {names[self._root]}")
        lines += [f"{numbered[name]}: {_written(part, names)}" for name, part in self._parts.items()]
        return "\n".join(lines)

    def _check_names(self) -> None:
        if self._root not in self._parts:
            raise GrammarRefused(f"the grammar must define {self._root}")
        for name in self._imports:
            if name in self._parts:
                raise GrammarRefused(f"the grammar must not define {quoted(name)}, which it imports")
        known_names = self._parts.keys() | set(self._imports)
        for part in (*self._parts.values(), *self._ignored):
            for name in _references(part):
                if name not in known_names:
                    raise GrammarRefused(f"the grammar must define {quoted(name)}, which it uses")

    def _regular(self) -> set[str]:
        """Return the names that do not refer to themselves, even through others: their texts are a regular language.

        As terminals, all of their texts are found: between lexemes the library takes the longest one.
        """
        regular_names: set[str] = set()
        for name in self._in_order(self._parts):
            part = self._parts[name]
            # A terminal must have more than the empty text.
            if regular_names.issuperset(_references(part)) and any(
                isinstance(inner, Terminal | Reference) for inner in _inner(part)
            ):
                regular_names.add(name)
        return regular_names

    def _in_order(self, names: Collection[str]) -> Iterator[str]:
        """Yield names that don't refer to themselves through others, each after the names that it refers to."""
        waiting = {
            name: {rule_name for rule_name in _references(self._parts[name]) if rule_name in names} for name in names
        }
        users: dict[str, list[str]] = {name: [] for name in names}
        for name, used in waiting.items():
            for rule_name in used:
                users[rule_name].append(name)
        ready = [name for name, used in waiting.items() if not used]
        while ready:
            name = ready.pop()
            yield name
            for user in users[name]:
                waiting[user].discard(name)
                if not waiting[user]:
                    ready.append(user)

    def _check_terminals(self) -> None:
        """Refuse terminals of Lark that refer to rules, or to themselves: terminals are regular expressions."""
        for name in self._terminals:
            if rules := set(_references(self._parts[name])) & self._parts.keys() - self._terminals:
                raise GrammarRefused(
                    f"the grammar: the terminal {quoted(name)} must not refer to rules, as {min(rules)}"
                )
        if circular := self._terminals - set(self._in_order(self._terminals)):
            raise GrammarRefused(f"the grammar: the terminal {quoted(min(circular))} must not refer to itself")

    def _check_ends(self) -> None:
        """Refuse names without a finite text, because an answer could never end."""
        ended = set(self._imports)
        users: dict[str, list[str]] = {name: [] for name in (*self._parts, *self._imports)}
        for name, part in self._parts.items():
            for reference in set(_references(part)):
                users[reference].append(name)
        pending = list(self._parts)
        while pending:
            name = pending.pop()
            if name not in ended and _has_end(self._parts[name], ended):
                ended.add(name)
                pending += users[name]
        if endless := self._parts.keys() - ended:
            raise GrammarRefused(f"the grammar: {quoted(min(endless))} has no text that ends")

    def _check_work(self) -> None:
        """Refuse a grammar that could take the library more work than its own limits allow."""
        most = dict.fromkeys(self._imports, float(COMMON_CHARACTERS))
        least = dict(most)
        for name in self._in_order(self._terminals):
            most[name] = _size(self._parts[name], most)
            least[name] = _size(self._parts[name], least, is_least=True)
        in_rules = [part for name, part in self._parts.items() if name not in self._terminals]
        inline = [lexeme for part in (*in_rules, *self._ignored) for lexeme in _terminals(part)]
        if sum(most.values()) + sum(lexeme.most for lexeme in inline) > MAX_EXPANDED_ITEMS:
            raise GrammarRefused(
                "the grammar's terminals, with what they refer to and their repetitions written out, must have at most"
                f" {MAX_EXPANDED_ITEMS:,} characters in all"
            )
        # If all texts of the grammar are short, any unfinished text can be finished within few characters. A rule that
        # refers to itself has no longest text, and so no entry in `whole`.
        whole = dict(most)
        for name in self._in_order(self._parts):
            whole[name] = _size(self._parts[name], whole)
        if whole.get(self._root, inf) <= MAX_EXPANDED_ITEMS and not self._ignored:
            return
        if max([*least.values(), *(lexeme.least for lexeme in inline)], default=0.0) > MAX_LEXEME:
            raise GrammarRefused(
                "the grammar's texts have no longest one, or a very long one; then each literal and each terminal must"
                f" demand at most {MAX_LEXEME} characters"
            )


def _size(part: Part, of: Mapping[str, float], *, is_least: bool = False) -> float:
    """Return the number of characters of a part, with its alternatives and repetitions written out.

    With `is_least`, count only its longest alternative, with the fewest repetitions.
    """
    match part:
        case Terminal():
            return part.least if is_least else part.most
        case Reference():
            # A rule that refers to itself has no size.
            return of.get(part.name, inf)
        case Series():
            return sum((_size(item, of, is_least=is_least) for item in part.parts), 0.0)
        case Choice():
            sizes = [_size(item, of, is_least=is_least) for item in part.parts]
            return max(sizes) if is_least else sum(sizes, 0.0)
        case Repeat():
            times = part.least if is_least else max(part.least, part.most or 0)
            # Use floats, which become inf: with integers, terminals that multiply one another would have thousands of
            # digits.
            return float(max(times, 1)) * _size(part.part, of, is_least=is_least)


def _inner(part: Part) -> Iterator[Part]:
    """Yield a part and all parts nested in it, in no particular order."""
    pending = [part]
    while pending:
        yield (current := pending.pop())
        if isinstance(current, Series | Choice):
            pending += current.parts
        elif isinstance(current, Repeat):
            pending.append(current.part)


def _references(part: Part) -> Iterator[str]:
    return (inner.name for inner in _inner(part) if isinstance(inner, Reference))


def _terminals(part: Part) -> Iterator[Terminal]:
    return (inner for inner in _inner(part) if isinstance(inner, Terminal))


def _has_end(part: Part, ended: Collection[str]) -> bool:
    """Return whether a part has a finite text, if only the names in `ended` have one."""
    match part:
        case Terminal():
            return True
        case Reference():
            return part.name in ended
        case Series():
            return all(_has_end(item, ended) for item in part.parts)
        case Choice():
            return any(_has_end(item, ended) for item in part.parts)
        case Repeat():
            return part.least == 0 or _has_end(part.part, ended)


def _written(part: Part, names: Mapping[str, str]) -> str:
    """Return a part as text of a Lark grammar, with rules and terminals by their names in `names`."""
    match part:
        case Terminal():
            return part.written
        case Reference():
            return names[part.name]
        case Series():
            return f"({' '.join(_written(item, names) for item in part.parts)})" if part.parts else '""'
        case Choice():
            return f"({' | '.join(_written(item, names) for item in part.parts)})"
        case Repeat():
            most = "" if part.most is None else str(part.most)
            return f"({_written(part.part, names)}){{{part.least},{most}}}"


def _is_terminal(name: str) -> bool:
    """Return whether a name in Lark is a terminal's, so whether its first letter is a capital."""
    return name.lstrip("_")[:1].isupper()


def _hex(character: str) -> str:
    return f"\\x{{{ord(character):X}}}"
