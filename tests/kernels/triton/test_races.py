"""What ``races.watch`` must see, and what it must not."""

from typing import Any

import pytest
import torch
from triton.runtime.errors import InterpreterError

from compilerllm.kernels.triton.source import function, generated

from .races import watch

KERNELS = """
import triton
import triton.language as tl


@triton.jit
def take(count, out, BARRIER: tl.constexpr):
    size = tl.load(count)
    if BARRIER:
        tl.debug_barrier()
    tl.store(count, 0)
    tl.store(out + tl.arange(0, 4), size)


@triton.jit
def back(out):
    tl.store(out + tl.arange(0, 4), 1)
    tl.store(out + 4 + tl.arange(0, 4), tl.load(out + 3 - tl.arange(0, 4)))


@triton.jit
def last(out):
    tl.store(out, tl.program_id(0))


@triton.jit
def arrive(parts, counter, out, ATOMIC: tl.constexpr):
    tl.store(parts + tl.program_id(0), 1)
    arrived = tl.program_id(0)
    if ATOMIC:
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    if arrived == 3:
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, 4)), 0))
"""


def run(name: str, programs: int, *args: Any) -> None:
    kernel = function(f"{generated(KERNELS)}:{name}", interpreted=True)
    with watch():
        kernel[(programs,)](*args)


def ints(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32)


def test_number_that_is_stored_over() -> None:
    with pytest.raises(InterpreterError, match="its threads load"):
        run("take", 1, ints(1), ints(4), False)
    run("take", 1, ints(1), ints(4), True)


def test_loading_what_other_threads_stored() -> None:
    with pytest.raises(InterpreterError, match="stored itself"):
        run("back", 1, ints(8))


def test_programs_that_store_to_one_place() -> None:
    with pytest.raises(InterpreterError, match="to the same address"):
        run("last", 2, ints(1))
    run("last", 1, ints(1))


def test_parts_of_others_need_an_atomic() -> None:
    with pytest.raises(InterpreterError, match="loads what program"):
        run("arrive", 4, ints(4), ints(1), ints(1), False)
    out = ints(1)
    run("arrive", 4, ints(4), ints(1), out, True)
    assert out.item() == 4
