"""Write README's tree: every file with the first line of its docstring or comment. ``--check`` only compares."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("compilerllm", "ir", "models", "passes", "kernels", "benchmarks")
MAX_PURPOSE = 120
SUFFIXES = {".py", ".h", ".js"}
BEGIN, END = "<!-- tree: written by `make tree` -->", "<!-- end of tree -->"


def purpose(path: Path) -> str:
    """The first sentence a file says about itself; a folder's is its ``__init__.py``'s."""
    text = path.read_text()
    if path.suffix == ".py":
        lines = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].splitlines()
        said = " ".join(lines)
    else:
        lead = re.match(r"(?:#pragma once\s*)?((?://[^\n]*\n)+)", text)
        said = " ".join(line.strip("/ ") for line in lead[1].splitlines()) if lead else ""
    first = re.split(r"(?<=[^.][.])\s+(?=\S)", said, maxsplit=1)[0].replace("``", "").removesuffix(".")
    for mark in ("; ", ": ", ", "):  # what is too long for a line loses its tail
        if len(first) > MAX_PURPOSE and mark in first[:MAX_PURPOSE]:
            first = first[: first.rindex(mark, 0, MAX_PURPOSE)]
    return first


def listing(folder: Path, depth: int) -> list[str]:
    own = folder / "__init__.py"
    lines = [row(f"{folder.name}/", purpose(own) if own.exists() else "", depth)]
    entries = sorted(folder.iterdir(), key=lambda p: (p.is_dir(), p.name))
    for path in entries:
        if path.is_dir() and any(p.suffix in SUFFIXES for p in path.rglob("*")):
            lines += listing(path, depth + 1)
        elif path.suffix in SUFFIXES and path != own:
            lines.append(row(path.name, purpose(path), depth + 1))
    return lines


def row(name: str, said: str, depth: int) -> str:
    return f"{'  ' * depth + name:<30} {said}".rstrip()


def main() -> int:
    lines = [line for name in FOLDERS if (ROOT / name).is_dir() for line in listing(ROOT / name, 0)]
    readme = ROOT / "README.md"
    text = readme.read_text()
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    fresh = f"{head}{BEGIN}\n```text\n" + "\n".join(lines) + f"\n```\n{END}{tail}"
    if fresh == text:
        return 0
    if "--check" in sys.argv:
        print("README.md: the tree is not what the folders hold; run `make tree`")
        return 1
    readme.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
