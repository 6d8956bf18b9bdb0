"""Compilers that die: what they did not do is done by fewer, and what kills one by itself is named."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from compilerllm.kernels.triton import build
from compilerllm.kernels.triton.source import KernelSource, generated
from compilerllm.kernels.triton.target import find_cuda_target

TARGET = find_cuda_target("sm_90")
TEXT = """
import triton
import triton.language as tl


@triton.jit
def fill(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32))
"""


def sources(count: int) -> list[KernelSource]:
    template = f"{generated(TEXT)}:fill"
    return [KernelSource.of(template, {"x": "*fp32"}, {"BLOCK": 1 << n}) for n in range(count)]


def dying(deadly: KernelSource, deaths: Path, most: int) -> Any:
    """A compiler that gives something, but ends its process up to ``most`` times at one of the sources."""

    def compile_source(source: KernelSource, capability: int) -> tuple[bytes, dict[str, Any]]:
        if source == deadly:
            with deaths.open("a") as file:
                file.write("x")
            if deaths.stat().st_size <= most:
                os._exit(1)
        return b"code", {"name": "fill", "num_warps": 4, "shared": 0, "early": []}

    return compile_source


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_start_method", lambda: "fork")


def test_the_rest_is_compiled_by_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = sources(6)
    monkeypatch.setattr(build, "compile_source", dying(wanted[3], tmp_path / "deaths", 1))
    left: list[int] = []
    with caplog.at_level(logging.WARNING):
        built = build.build_kernels(
            wanted, TARGET, tmp_path, lambda done, total: left.append(total - done), workers=4
        )
    assert set(built) == set(wanted) and left[-1] == 0
    assert "fill or another kernel was compiled" in caplog.text and "for fewer processes" in caplog.text


def test_a_kernel_that_kills_every_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = sources(6)
    monkeypatch.setattr(build, "compile_source", dying(wanted[3], tmp_path / "deaths", 99))
    with pytest.raises(build.KernelBuildError, match=r"fill was compiled for sm_90.*'BLOCK': 8"):
        build.build_kernels(wanted, TARGET, tmp_path, workers=16)
    assert (tmp_path / "deaths").stat().st_size == 2, "among six processes, then in the last one"
