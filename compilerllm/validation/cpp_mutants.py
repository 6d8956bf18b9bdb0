"""Mutants of the CPU's C++ templates: edits of tokens, made by operators."""

import re
from collections.abc import Iterator

from compilerllm.validation.mutants import Edit, Mutant, shortened, text_of
from compilerllm.validation.reach import block_name

_TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|[A-Za-z_][\w:]*|\d[\w.]*(?:e-?\d+f?)?|<<=|>>=|<=|>=|==|!=|&&|\|\||[-+*/&|]=|\+\+|--|->|::|\S",
    re.DOTALL,
)
_PAIRS = {
    "min_int": "max_int", "max_int": "min_int", "vmin": "vmax", "vmax": "vmin", "load_part": "load_part_", "lt": "le",
    "le": "lt",
}  # fmt: skip
_CLOSE = {"(": ")", "[": "]", "{": "}"}


class _Tokens:
    """A file's tokens with their places; comments are none."""

    def __init__(self, text: str) -> None:
        self.text = text
        found = [(m.group(), m.start()) for m in _TOKEN.finditer(text)]
        self.tokens = [(t, at) for t, at in found if not t.startswith(("//", "/*"))]

    def __getitem__(self, index: int) -> str:
        return self.tokens[index][0] if 0 <= index < len(self.tokens) else ""

    def start(self, index: int) -> int:
        return self.tokens[index][1]

    def end(self, index: int) -> int:
        return self.tokens[index][1] + len(self.tokens[index][0])

    def closing(self, index: int) -> int:
        """The token that closes the bracket at ``index``."""
        depth, want = 0, _CLOSE[self[index]]
        for i in range(index, len(self.tokens)):
            if self[i] == self[index]:
                depth += 1
            elif self[i] == want:
                depth -= 1
                if not depth:
                    return i
        return index

    def arguments(self, index: int) -> list[tuple[int, int]]:
        """Character spans of the arguments in the bracket at ``index``."""
        stop = self.closing(index)
        spans, depth, begin = [], 0, index + 1
        for i in range(index + 1, stop + 1):
            if self[i] in _CLOSE:
                depth += 1
            elif self[i] in _CLOSE.values() and i != stop:
                depth -= 1
            if i == stop or (self[i] == "," and not depth):
                if i > begin:
                    spans.append((self.start(begin), self.end(i - 1)))
                begin = i + 1
        return spans


def _edits(s: _Tokens, i: int) -> Iterator[tuple[str, int, int, str]]:
    """(operator, start, stop, new text) of what may be changed at token ``i``."""
    token, text = s[i], s.text
    a, b = s.start(i), s.end(i)
    spaced = text[a - 1 : a] == " " and text[b : b + 1] == " "
    if token == "<" and spaced:
        yield "shift a bound", a, b, "<="
    elif token in ("<=", ">="):
        yield "shift a bound", a, b, token[0]
    elif token == ">" and spaced:
        yield "shift a bound", a, b, ">="
    elif token in ("==", "!="):
        yield "negate a condition", a, b, "!=" if token == "==" else "=="
    elif token in ("+", "-", "*") and spaced and s[i - 1] not in ("=", "(", ",", "return", "const"):
        yield "change an operation", a, b, {"+": "-", "-": "+", "*": "+"}[token]
    elif token in ("+=", "-=", "*="):
        yield "drop the accumulator", a, b, "="
    elif token in ("&&", "||"):
        yield "change a condition", a, b, "||" if token == "&&" else "&&"
    elif token == "if" and s[i + 1] == "(":
        stop = s.closing(i + 1)
        yield "negate a condition", s.start(i + 1), s.end(stop), f"(!{text[s.start(i + 1) : s.end(stop)]})"
        end = text.find(";", s.end(stop))
        if s[stop + 1] not in ("{", "return", "continue", "constexpr") and end > 0:
            yield "delete a statement", a, end + 1, ";"
        elif s[stop + 1] in ("return", "continue"):
            yield "delete a guard", a, end + 1, ";"
    elif token == "apply" or (token.endswith("::apply") and s[i + 1] == "("):
        yield "drop a rounding", _qualified(s, i), s.end(i), ""
    elif s[i + 1] == "(" and token in (
        "fma",
        "select",
        "load_part",
        "store_part",
        "min_int",
        "max_int",
        "vmin",
        "vmax",
        "lt",
        "le",
    ):
        spans = s.arguments(i + 1)
        parts = [text[x:y] for x, y in spans]
        stop = s.end(s.closing(i + 1))
        if token == "fma" and len(parts) == 3:
            yield "drop a term", a, stop, f"({parts[0]} * {parts[1]})"
        elif token == "select" and len(parts) == 3:
            yield "swap operands", a, stop, f"select({parts[0]}, {parts[2]}, {parts[1]})"
            yield "skip a mask", a, stop, f"({parts[1]})"
        elif token == "load_part" and len(parts) == 2:
            yield "skip a mask", a, stop, f"load({parts[0]})"
        elif token == "store_part" and len(parts) == 3:
            yield "skip a mask", a, stop, f"store({parts[0]}, {parts[1]})"
        elif len(parts) == 2:
            yield "swap a bound", a, b, _PAIRS[token]
            yield "drop a bound", a, stop, f"({parts[0]})"
    elif (
        re.fullmatch(r"\d+", token)
        and s[i - 1] in ("+", "-", "<", "[", "=", "*", "/", "%")
        and s[i + 1] in (";", ")", "]", ",", "+", "-", "*")
    ):
        yield "shift a bound", a, b, str(int(token) + 1)


def _qualified(s: _Tokens, i: int) -> int:
    """Where the name before ``apply`` begins: ``Round<OT>::apply``."""
    if s[i] != "apply":
        return s.start(i)
    at = i - 1
    if s[at] == "::":
        at -= 1
    if s[at] == ">":
        while s[at] != "<":
            at -= 1
        at -= 1
    return s.start(at)


def cpp_mutants(path: str) -> list[Mutant]:
    """Every mutant of a C++ file that its operators make; some do not compile, and then are none."""
    text = text_of(path)
    s = _Tokens(text)
    hidden = [
        m.span()
        for m in re.finditer(r"^[ \t]*#.*?$|static_assert\([^;]*;|^template <[^{;]*?>\s*$", text, re.M)
    ]
    lines = text.split("\n")
    made: list[Mutant] = []
    for i in range(len(s.tokens)):
        if any(x <= s.start(i) < y for x, y in hidden):
            continue
        for operator, a, b, new in _edits(s, i):
            line = text.count("\n", 0, a)
            begin = text.rfind("\n", 0, a) + 1
            after = (text[begin:a] + new + text[b:]).split("\n")[0]
            made.append(
                Mutant(
                    path,
                    line + 1,
                    operator,
                    _function(lines, line),
                    shortened(lines[line]),
                    shortened(after),
                    Edit(a, b, new),
                )
            )
    return list({m.edit: m for m in made}.values())


def _function(lines: list[str], line: int) -> str:
    """The name of the function that a line is in: of the last line before it that begins in the first column."""
    for at in range(line, -1, -1):
        if lines[at] and not lines[at].startswith((" ", "}", "#", "//", "template", "namespace")):
            return block_name(lines[at])
    return ""
