"""CONTRIBUTING's worked examples, applied to a copy of the tree and run as written."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("compilerllm", "ir", "kernels", "models", "passes", "tests")
FENCE = re.compile(r"^```(diff|python|cpp|ir|console) ?([^\n]*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


def apply(root: Path, name: str, hunks: str) -> None:
    """Change a file by hunks: lines with ``-`` are replaced by those with ``+``; all others must be there."""
    path = root / name
    for hunk in re.split(r"^@@.*\n", hunks, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        text = path.read_text()
        assert text.count(old) == 1, f"{name} has these lines {text.count(old)} times, not once:\n{old}"
        path.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout that Python finds without an install: what setuptools maps is linked instead."""
    root = tmp_path_factory.mktemp("checkout")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for folder in ("ir", "kernels", "models", "passes"):
        (root / "compilerllm" / folder).symlink_to(root / folder)
    return root


def sections() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Worked examples")[2]
    return re.split(r"^### ", text, flags=re.MULTILINE)[1:]


def test_the_examples_are_there() -> None:
    assert [section.split("\n")[0] for section in sections()] == [
        "An op",
        "A pass",
        "A kernel",
        "A kernel for a GPU",
        "A model's quirk",
    ]


def test_the_examples_work(copy: Path) -> None:
    """In their order, since each builds on those before it."""
    ran = 0
    for section in sections():
        for kind, name, body in FENCE.findall(section):
            if kind == "diff":
                apply(copy, name, body)
            elif kind == "console":
                for command in re.findall(r"^\$ \.venv/bin/python (.*)$", body, flags=re.MULTILINE):
                    run(copy, shlex.split(command))
                    ran += 1
            elif name:
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                (copy / name).write_text(body)
    assert ran >= 5


def run(root: Path, arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "COMPILERLLM_CACHE_DIR": str(root / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, " ".join(arguments) + "\n" + done.stdout[-4000:] + done.stderr[-4000:]
    if "pytest" in arguments:
        assert " passed" in done.stdout


# The applier itself.


def test_a_hunk_must_fit_once(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 2\nx = 1\n")
    with pytest.raises(AssertionError, match="2 times"):
        apply(tmp_path, "a.py", "@@\n-x = 1\n+x = 3\n")
    apply(tmp_path, "a.py", "@@\n y = 2\n-x = 1\n+x = 3\n")
    assert (tmp_path / "a.py").read_text() == "x = 1\ny = 2\nx = 3\n"
