"""Opaque operators in CPU programs: grouped, run by the host in torch, or compiled ahead by Inductor."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from compilerllm.artifact import opaque_line
from compilerllm.cpu_artifact import compile_opaque, opaque_entries
from compilerllm.ir.text import parse_module
from compilerllm.kernels.cpu.emit import emit_program
from compilerllm.kernels.cpu.emitter import Program
from compilerllm.kernels.cpu.inductor import Outcome, compile_host_calls
from compilerllm.kernels.cpu.opaque import HostCall
from compilerllm.kernels.cpu.select import select_layouts
from compilerllm.kernels.cpu.target import host_target
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.launch.aten import HostProgram
from compilerllm.passes.pipeline import Options, run_pipeline

from .program import run_text

GROUPED = """
func @main(%x: {dtype}[T, 8], %y: {dtype}[2, T, 3]) {{
  dim T in [1, 64]
  %n = neg(%x) : {dtype}[T, 8]
  %a, %i = aten(%n, target="aten.sort.stable", args=["%0"], kwargs=[["stable", true], ["dim", 1]]) : {dtype}[T, 8], i64[T, 8]
  %top = slice(%a, axis=1, start=2, stop=8, step=2) : {dtype}[T, 3]
  %turned = permute(%y, order=[1, 0, 2]) : {dtype}[T, 2, 3]
  %flat = reshape(%turned, shape=[T, 6]) : {dtype}[T, 6]
  %b = aten(%top, %flat, target="aten.cat.default", args=[["%0", "%1"], 1]) : {dtype}[T, 9]
  %wide = reshape(%b, shape=[T, 3, 3]) : {dtype}[T, 3, 3]
  %rows = permute(%wide, order=[2, 0, 1]) : {dtype}[3, T, 3]
  %c = aten(%rows, target="aten.amax.default", args=["%0", [0], false]) : {dtype}[T, 3]
  %s = aten(%c, target="aten.reshape.default", args=["%0", [3 * T, 1]]) : {dtype}[3*T, 1]
  %m = exp(%s) : {dtype}[3*T, 1]
  return %m, %i
}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("libraries")


def host_calls(text: str) -> list[HostCall]:
    module, _ = run_pipeline(parse_module(text), Options(serve=False, verify=True))
    return emit_program(select_layouts(module, host_target()), host_target()).host_calls


def one_call(*operators: str, inputs: str = "%x: f32[T, 4]", result: str = "f32[T, 4]") -> HostCall:
    """The host call of operators in a row, each given as its target and arguments."""
    lines, last = [], "%x"
    for number, operator in enumerate(operators):
        target, _, args = operator.partition(" ")
        lines.append(f'  %v{number} = aten({last}, target="{target}", args=[{args}]) : {result}')
        last = f"%v{number}"
    body = "\n".join(lines)
    text = f"func @main({inputs}) {{\n  dim T in [1, 64]\n{body}\n  return {last}\n}}\n"
    (call,) = host_calls(text)
    return call


def program_of(call: HostCall, outcome: Outcome | None = None) -> HostProgram:
    """The call as an artifact brings it back: through JSON."""
    spec: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(call)))
    if outcome is None or outcome.package is None:
        return HostProgram(spec)
    return HostProgram(spec | {"package": outcome.package.name}, outcome.package.parent)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("T", [1, 5])
def test_a_group_is_one_host_call(T: int, dtype: str, folder: Path) -> None:
    outcome = run_text(GROUPED.format(dtype=dtype), folder, T=T)
    assert outcome.kernels.count("host") == 1
    for got, want in zip(outcome.got, outcome.want, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2 if dtype == "bf16" else 1e-5, atol=1e-6)


def test_intermediate_values_take_no_place_in_the_arena() -> None:
    module, _ = run_pipeline(parse_module(GROUPED.format(dtype="f32")), Options(serve=False))
    program = emit_program(select_layouts(module, host_target()), host_target())
    assert {v.name for _, v in program.slots} == {"n", "flat", "s"}  # flat is a copy, made for the host


CALLS: list[int] = []


@torch.library.custom_op("compilerllm_test::once", mutates_args=())
def once(x: torch.Tensor) -> torch.Tensor:
    """Runs in the reference, and not a second time in the program."""
    CALLS.append(1)
    if len(CALLS) > 1:
        raise ValueError("not again")
    return x.clone()


def test_an_operator_that_fails_says_where(folder: Path) -> None:
    text = """
func @main(%x: f32[T, 4]) {
  dim T in [1, 64]
  %y = aten(%x, target="compilerllm_test.once.default", args=["%0"]) : f32[T, 4]
  return %y
}
"""
    with pytest.raises(ValueError, match="not again") as caught:
        run_text(text, folder, T=2)
    assert "in @main" in caught.value.__notes__


def test_a_packed_weight_is_not_handed_to_torch() -> None:
    text = """
func @main(%x: f32[T, 16]) {
  dim T in [1, 64]
  param %w : f32[16, 16]
  %a = linear(%x, %w) : f32[T, 16]
  %b = aten(%a, %w, target="aten.mm.default", args=["%0", "%1"]) : f32[T, 16]
  return %b
}
"""
    with pytest.raises(UnsupportedByTarget, match="reads %w, which is packed"):
        host_calls(text)


@torch.library.custom_op("compilerllm_test::shift", mutates_args=())
def shift(x: torch.Tensor) -> torch.Tensor:
    """An operator that torch cannot export, since nothing says what it gives for fake tensors."""
    return x + 1


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (one_call('aten.bernoulli.p "%0", 0.5'), "draws random numbers"),
        (one_call('aten.cumsum.default "%0", 0', inputs="%x: f32[2*T, 2]", result="f32[2*T, 2]"), "no operand has an axis of extent T"),
        (one_call('compilerllm_test.shift.default "%0"'), "compilerllm_test"),
    ],
    ids=["random", "size", "no-fake"],
)  # fmt: skip
def test_what_inductor_cannot_compile_stays_with_torch(call: HostCall, reason: str, tmp_path: Path) -> None:
    (outcome,) = compile_host_calls([call], host_target(), tmp_path)
    assert outcome.package is None and reason in outcome.reason
    assert not list(tmp_path.iterdir()), "something was left behind"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_inductor_agrees_with_torch(dtype: str, tmp_path: Path) -> None:
    """At sizes it was not traced with, one among them; the second build finds the package."""
    calls = host_calls(GROUPED.format(dtype=dtype))
    (outcome,) = compile_host_calls(calls, host_target(), tmp_path)
    assert outcome.package is not None, outcome.reason
    start = time.perf_counter()
    assert compile_host_calls(calls, host_target(), tmp_path)[0].package == outcome.package
    assert time.perf_counter() - start < 1
    plain, compiled = program_of(calls[0]), program_of(calls[0], outcome)
    assert compiled.package is not None
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    for T in (1, 2, 37, 0):
        operands = [torch.randn(T, 8).to(kind), torch.randn(T, 6).to(kind)]
        want, got = (p.compute(operands, {"T": T}) for p in (plain, compiled))
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(b, a)


def test_a_build_reports_what_was_not_compiled(tmp_path: Path) -> None:
    program = Program(host_target().name, ["T"], host_calls=[one_call('aten.bernoulli.p "%0", 0.5')])
    entries = opaque_entries(program)
    compile_opaque(program, entries, host_target(), tmp_path)
    assert entries[0]["runs"] == "aten" and "draws random numbers" in entries[0]["reason"]
    assert entries[0]["operators"] == ["aten.bernoulli.p"]
    line = opaque_line({"opaque": entries})
    assert line.startswith(
        "1 torch operators in 1 calls of the host, 0 compiled by Inductor; not compiled: @main"
    )
    assert "random" in line and not opaque_line({"opaque": []})
