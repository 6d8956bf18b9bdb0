"""Every ``cases/<pass>/*.ir``: what a pass makes of a module, in text and in numbers.

A case is a module, ``---``, the module afterwards and a line for each near miss. ``COMPILERLLM_ACCEPT=1`` rewrites the
second part; read the difference before you commit it.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compilerllm.ir.graph import Graph, Module
from compilerllm.ir.step import Bucket
from compilerllm.ir.text import parse_module, print_module
from compilerllm.ir.types import StepType, TensorType
from compilerllm.ir.verify import verify
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.passes.add_adapters import AdapterOptions, add_adapters
from compilerllm.passes.fuse_norm_linear import fuse_norm_linear
from compilerllm.passes.fuse_norm_route import fuse_norm_route
from compilerllm.passes.fuse_qkv_attention import fuse_qkv_attention
from compilerllm.passes.fuse_route import fuse_route
from compilerllm.passes.gather_early import gather_early
from compilerllm.passes.inline_calls import inline_calls
from compilerllm.passes.pipeline import Options, find_pass, pass_names
from compilerllm.passes.report import PassReport
from compilerllm.passes.sample_every_token import sample_every_token
from compilerllm.passes.shard import Mesh, shard
from compilerllm.passes.specialize import specialize
from compilerllm.validation.weights import bind, checkpoint, random_tensor
from tests.passes.running import Served

CASES = sorted((Path(__file__).parent / "cases").glob("*/*.ir"))
ACCEPT = os.environ.get("COMPILERLLM_ACCEPT") == "1"
TOKENS = 5

Run = Callable[[Module, list[PassReport]], Module]


def _with_report(run: Callable[[Module, PassReport], Module], name: str) -> Run:
    def wrapped(module: Module, reports: list[PassReport]) -> Module:
        reports.append(PassReport(name))
        return run(module, reports[-1])

    return wrapped


def _on_main(run: Callable[[Graph, PassReport], Graph]) -> Callable[[Module, PassReport], Module]:
    def wrapped(module: Module, report: PassReport) -> Module:
        main = run(module.main, report)
        return module if main is module.main else module.with_functions(main)

    return wrapped


# Passes that need more than the module.
RUNS: dict[str, Run] = {
    "shard": _with_report(lambda m, r: shard(m, Mesh(1, 2), r), "shard"),
    "add_adapters": _with_report(
        lambda m, r: add_adapters(m, AdapterOptions(("q_proj",), 3, 2), r), "add_adapters"
    ),
    "fuse_norm_linear": _with_report(_on_main(fuse_norm_linear), "fuse_norm_linear"),
    "gather_early": _with_report(lambda m, r: m.with_functions(gather_early(m.main, r)), "gather_early"),
    "sample_every_token": _with_report(_on_main(sample_every_token), "sample_every_token"),
    "inline_calls": _with_report(inline_calls, "inline_calls"),
    "fuse_norm_route": _with_report(_on_main(fuse_norm_route), "fuse_norm_route"),
    "fuse_qkv_attention": _with_report(_on_main(fuse_qkv_attention), "fuse_qkv_attention"),
    "fuse_route": _with_report(fuse_route, "fuse_route"),
    "specialize": _with_report(lambda m, r: specialize(m, Bucket(1, 1, 4, 1)), "specialize"),
}
# What these change is more than how a function computes the same numbers from the same inputs.
OTHER_NUMBERS = frozenset(("shard", "add_adapters", "page_attention", "specialize"))


def run_pass(name: str, module: Module) -> tuple[Module, list[PassReport]]:
    if name not in RUNS:
        return find_pass(name).run(module, Options())
    reports: list[PassReport] = []
    return RUNS[name](module, reports), reports


def _parts(path: Path) -> tuple[str, str]:
    before, _, after = path.read_text().partition("---\n")
    return before, after


@pytest.mark.parametrize("path", CASES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_case(path: Path) -> None:
    before, after = _parts(path)
    module = parse_module(before, str(path))
    verify(module)
    result, reports = run_pass(path.parent.name, module)
    verify(result)
    misses = [f"# near miss: {miss}\n" for report in reports for miss in report.near_misses]
    text = "".join((print_module(result), *misses))
    assert print_module(parse_module(text)) == print_module(result), "the result does not read back"
    if ACCEPT:
        path.write_text(f"{before}---\n{text}")
        return
    assert text == after
    same = print_module(result) == print_module(module)
    assert same == (result is module), "a pass that changes nothing returns the module itself"


@pytest.mark.parametrize("path", CASES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_case_keeps_every_bit(path: Path) -> None:
    if path.parent.name in OTHER_NUMBERS:
        pytest.skip("this pass changes what the numbers are of; it has tests of its own")
    module = parse_module(_parts(path)[0], str(path))
    result, _ = run_pass(path.parent.name, module)
    tensors = checkpoint(module)
    want, got = (numbers(m, tensors) for m in (module, result))
    for a, b in zip(want, got, strict=True):
        # float_logits rounds later, so its result is compared as the old one was rounded.
        torch.testing.assert_close(b.to(a.dtype).reshape(a.shape), a, rtol=0, atol=0)


def numbers(module: Module, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """What ``main`` gives for random inputs, or for a step of two sequences."""
    if any(isinstance(v.type, StepType) for v in module.main.inputs):
        return (Served(module, tensors, 2).step([[3, 1, 4], [1, 5]]),)
    generator = torch.Generator().manual_seed(1)
    inputs = [_input(v.tensor, generator) for v in module.main.inputs]
    return Interpreter(module, bind(module, tensors)).run(*inputs)


def _input(type: TensorType, generator: torch.Generator) -> Tensor:
    shape = tuple(TOKENS if not isinstance(d, int) else d for d in type.shape)
    if not type.is_float:
        return torch.randint(0, 4, shape, generator=generator)
    return random_tensor(TensorType(type.dtype, shape), generator) * 4


def test_every_pass_has_cases() -> None:
    names = pass_names() | RUNS.keys()
    found = {p.parent.name for p in CASES}
    assert found == names
