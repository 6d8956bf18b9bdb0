"""Finding a C++ compiler."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from compilerllm.kernels.cpu.build import compiler
from compilerllm.kernels.errors import BuildFailed


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    compiler.cache_clear()
    yield
    compiler.cache_clear()


def test_cxx_is_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env g++")
    command, version = compiler()
    assert command == ("env", "g++") and "g++" in version.lower()


def test_a_wrong_cxx_is_told_and_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(BuildFailed, match="CXX names '/nowhere/g\\+\\+', which is no program"):
        compiler()


def test_no_compiler_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("g++") is None
    with pytest.raises(BuildFailed, match="Install g\\+\\+ 11 or newer"):
        compiler()
