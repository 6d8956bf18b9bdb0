"""A kernel's description: equal exactly when the kernels are, and complete for every kernel of a program."""

import dataclasses

import pytest

from compilerllm.cpu_artifact import program_entries
from compilerllm.ir.step import Bucket
from compilerllm.ir.text import parse_module
from compilerllm.kernels.cpu.build import kernel_key
from compilerllm.kernels.cpu.emit import emit_program
from compilerllm.kernels.cpu.select import select_layouts
from compilerllm.kernels.cpu.target import TARGETS
from compilerllm.kernels.spec import KernelSpec
from compilerllm.passes.pipeline import Options, run_pipeline

TEXT = """
func @main(%x: f32[T, 32]) {
  dim T in [1, 8]
  param %w : f32[32, 32]
  param %v : f32[32, 32]
  %a = linear(%x, %w) : f32[T, 32]
  %n = rms_norm(%a, eps=1e-06) : f32[T, 32]
  %b = linear(%n, %v) : f32[T, 32]
  %s = sum(%b, axis=1, keepdim=true) : f32[T, 1]
  %y = div(%b, %s) : f32[T, 32]
  %z = aten(%y, target="aten.cumsum.default", args=["%0", 1]) : f32[T, 32]
  return %z
}
"""
GENERIC = next(t for t in TARGETS if t.name == "cpu-generic")


def specs(text: str, target: str = "cpu-generic") -> list[KernelSpec]:
    chosen = next(t for t in TARGETS if t.name == target)
    module, _ = run_pipeline(parse_module(text), Options(serve=False, verify=True))
    return [use.spec for use in emit_program(select_layouts(module, chosen), chosen).kernels]


def test_a_program_describes_its_kernels() -> None:
    first, norm, second, loop, host = specs(TEXT)
    assert first == KernelSpec(
        "linear", ("f32[T, 32]", "f32[32, 32]", "f32[T, 32]"), (), "cpu-generic", "linear",
        (("values", "float"), ("weights", "F32W")), "contraction",
    )  # fmt: skip
    assert first == second, "the same kernel twice, whatever its values are called"
    assert (norm.template, norm.reduction_key, norm.types) == (
        "rms_norm",
        "row",
        ("f32[T, 32]", "f32[T, 32]"),
    )
    assert ("eps", "1e-06") in norm.attrs
    assert (loop.op, loop.template, loop.reduction_key) == ("group", "loop", "row")
    assert "div(" in dict(loop.attrs)["fn"], "a group is described by what it computes, not by a name"
    assert (host.template, host.reduction_key) == ("host", "unknown")


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("eps=1e-06", "eps=1e-05", "rms_norm"),
        ("div(%b, %s)", "mul(%b, %s)", "loop"),
        ("cumsum", "cumprod", "host"),
    ],
)
def test_another_kernel_has_another_key(old: str, new: str, changed: str) -> None:
    before, after = specs(TEXT), specs(TEXT.replace(old, new))
    assert [a.template for a, b in zip(before, after, strict=True) if a.key() != b.key()] == [changed]


def test_key_holds_target_and_sources() -> None:
    here, there = specs(TEXT)[0], specs(TEXT, "cpu-avx2")[0]
    assert here == dataclasses.replace(there, target="cpu-generic")
    assert (
        len({here.key(), there.key(), here.key("a"), here.key("b"), here.key("a", "b"), here.key("ab")}) == 6
    )


def test_manifest_lists_kernels_by_key() -> None:
    module = select_layouts(parse_module(TEXT), GENERIC)
    program = emit_program(module, GENERIC)
    entries = program_entries(module, program, (Bucket(8, 1, 1, 8),))["kernels"]
    assert [e["key"] for e in entries] == [kernel_key(use.spec) for use in program.kernels]
    assert entries[0]["function"] == "main" and entries[0]["node"] == "%a = linear(%x, %w) : f32[T, 32]"
    assert {e["target"] for e in entries} == {"cpu-generic"}
