"""Which functions of the templates a kernel is made of, by the names that they mention: an edit elsewhere cannot reach it."""

import ast
import re
from collections.abc import Iterable, Mapping
from functools import cache

from compilerllm.kernels.cpu.build import SOURCE_DIR

_WORD = re.compile(r"[A-Za-z_]\w*")


def closure(first: Iterable[str], names: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """All that ``first`` mention, directly or not."""
    found, wanted = set[str](), list(first)
    while wanted:
        name = wanted.pop()
        if name not in found and name in names:
            found.add(name)
            wanted += names[name]
    return frozenset(found)


@cache
def _triton_module(stem: str) -> tuple[dict[str, str], dict[str, frozenset[str]]]:
    """Where a template module's names come from, and the names that each of its functions mentions."""
    from compilerllm.kernels.triton.source import source_text

    tree = ast.parse(source_text(stem).partition("\0")[0])
    origin, mentions = dict[str, str](), dict[str, frozenset[str]]()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            origin |= {a.name: node.module for a in node.names}
        elif isinstance(node, ast.FunctionDef):
            mentions[node.name] = frozenset(x.id for x in ast.walk(node) if isinstance(x, ast.Name))
    return origin, mentions


def triton_functions(template: str) -> frozenset[str]:
    """ "module.function" of all that a template ("module:function") calls, itself included."""
    found, wanted = set[str](), [tuple(template.split(":"))]
    while wanted:
        stem, name = wanted.pop()
        origin, mentions = _triton_module(stem)
        key = f"{stem}.{name}"
        if key in found or name not in mentions:
            continue
        found.add(key)
        wanted += [(origin.get(other, stem), other) for other in mentions[name]]
    return frozenset(found)


@cache
def _headers() -> dict[str, frozenset[str]]:
    """What each function, struct and constant of the C++ templates mentions."""
    found: dict[str, set[str]] = {}
    for path in [*SOURCE_DIR.glob("*.h"), *SOURCE_DIR.glob("*.cpp")]:
        for name, text in blocks(path.read_text()):
            found.setdefault(name, set()).update(_WORD.findall(text))
    return {n: frozenset(words) for n, words in found.items()}


def blocks(text: str) -> list[tuple[str, str]]:
    """(name, text) of what begins in the first column: a name may have several."""
    made: list[tuple[str, list[str]]] = []
    for line in text.split("\n"):
        if line and not line.startswith((" ", "}", "#", "//", "template", "namespace")):
            made.append((block_name(line), []))
        if made:
            made[-1][1].append(line)
    return [(name, "\n".join(lines)) for name, lines in made]


def block_name(line: str) -> str:
    """The name that a line which begins in the first column declares."""
    found = re.search(r"(\w+)\s*(?:\(|\{|=|;|:)", line)
    return found[1] if found else line.split()[-1]


def cpp_names(source: str) -> frozenset[str]:
    """Names of the templates' blocks that a generated program is made of."""
    names = _headers()
    return closure(set(_WORD.findall(source)) & names.keys(), names)
