"""The documents name things that exist."""

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from compilerllm.config import CONFIG_PARTS, flag_of
from compilerllm.server.config import ServerConfig

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_every_flag_is_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    flags = [
        flag_of(f.name) for part in (*CONFIG_PARTS.values(), ServerConfig) for f in dataclasses.fields(part)
    ]
    missing = [flag for flag in flags if flag != "--model" and f"`{flag}`" not in text]
    assert not missing, f"docs/cli.md does not mention {missing}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_files_that_a_document_names_exist(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|md|toml|h))`", text)
    folders = (
        "",
        "docs",
        "compilerllm",
        "ir",
        "kernels",
        "kernels/cpu",
        "kernels/cpu/csrc",
        "models",
        "passes",
        "tests",
    )
    gone = [
        name
        for name in named
        if name != "utils.py" and not any((ROOT / folder / name).exists() for folder in folders)
    ]
    assert not gone, f"{path.name} names {gone}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_python_in_documents_is_python(path: Path) -> None:
    for source in blocks(path, "python"):
        ast.parse(source)


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    assert phony is not None
    listed = set(re.findall(r"^([a-z-]+):.*## ", makefile, flags=re.MULTILINE))
    assert set(phony[1].split()) == listed


def test_readme_tree_is_the_tree() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "tree.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
