"""Times of a step's kernels, without a GPU: records a profiler might give, matched to launches."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from compilerllm.benchmark import KernelTimer, Roofed
from compilerllm.compiled_cuda import CudaModel
from compilerllm.ir.step import StateGroup
from compilerllm.kernel_times import (
    StepDoesNotFit,
    TimesDoNotMatch,
    _grouped,
    made_up_step,
    match_records,
    read_rate,
)
from compilerllm.kernels.launch.gpu.program import Cost, Kernel, Launch

Records = list[tuple[str, float]]


def match(records: Records, names: list[str], repeats: int = 1) -> list[float]:
    return [float(us) for us in match_records(records, names, repeats)]


def test_each_launch_gets_its_own_record() -> None:
    """One name twice: by order, not by name. Two runs: their mean."""
    first: Records = [("gemv", 3.0), ("norm", 1.0), ("gemv", 5.0)]
    second: Records = [("gemv", 4.0), ("norm", 2.0), ("gemv", 7.0)]
    assert match(first + second, ["gemv", "norm", "gemv"], 2) == [3.5, 1.5, 6.0]


def test_a_library_call_gets_all_up_to_the_next_launch() -> None:
    """cuBLAS splits K: a product and a reduction. The last call of a run ends where the next run begins."""
    run: Records = [
        ("embed", 1.0),
        ("sm90_gemm", 8.0),
        ("splitk_reduce", 2.0),
        ("norm", 1.0),
        ("sm90_gemm", 30.0),
    ]
    assert match(run * 3, ["embed", "", "norm", ""], 3) == [1.0, 10.0, 1.0, 30.0]


def test_of_two_library_calls_in_a_row_the_first_has_one_record() -> None:
    run: Records = [("embed", 1.0), ("gemm_a", 8.0), ("gemm_b", 9.0), ("reduce_b", 2.0)]
    assert match(run * 2, ["embed", "", ""], 2) == [1.0, 8.0, 11.0]


def test_a_run_may_begin_with_a_library_call() -> None:
    run: Records = [("gemm", 8.0), ("norm", 1.0)]
    assert match(run * 2, ["", "norm"], 2) == [8.0, 1.0]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([("norm", 1.0), ("other", 1.0)], "launch 1 is gemv, but the profiler saw other"),
        ([("norm", 1.0)], "launch 1 is gemv, but the profiler saw nothing"),
        ([("norm", 1.0), ("gemv", 1.0), ("fill", 1.0)], "saw fill after the last launch"),
    ],
)
def test_records_of_something_else_are_refused(records: Records, said: str) -> None:
    with pytest.raises(TimesDoNotMatch, match=said):
        match(records, ["norm", "gemv"])


def test_equal_kernels_of_layers_are_one_line() -> None:
    """Bytes grow with the contexts of all sequences, operations with what a query sees on average."""
    kernels = [Kernel("attend", "a", "attention:decode", ()), Kernel("gemv", "b", "linear:gemv", ())]
    cost = Cost(1000.0, 0.0, 10.0, 4.0)
    node = "%y = paged_attention(%q, %kv) : bf16[T, 64]"
    launches = [Launch(0, (1, 1, 1), (), node, cost), Launch(1, (1, 1, 1), (), "%z = linear(%y, %w)")] * 2
    attend, gemv = _grouped(
        launches, kernels, np.array([2.0, 7.0, 4.0, 7.0]), sequences=3, query=1, context=100
    )
    assert (attend.kernel, attend.launches, attend.microseconds) == ("attention:decode", 2, 3.0)
    assert attend.node.startswith("paged_attention")
    assert (attend.nbytes, attend.flops) == (1000.0 + 10.0 * 300, 4.0 * 100)
    assert (gemv.launches, gemv.nbytes) == (2, 0.0)
    prompt, _ = _grouped(launches[:2], kernels, np.array([2.0, 7.0]), sequences=1, query=100, context=100)
    assert prompt.flops == 4.0 * 50.5  # causal: 1, 2 ... 100 keys


def fake(**attributes: object) -> CudaModel:
    groups = (StateGroup("kv", "paged", 32, 64, None), StateGroup("kv_window_64", "paged", 32, 64, 64))
    given = {"groups": groups, "max_model_len": 128, "num_blocks": 6, "vocab_size": 50} | attributes
    return cast(CudaModel, SimpleNamespace(**given))


def test_a_made_up_step() -> None:
    step = made_up_step(fake(), sequences=2, query=3, context=40)
    assert step.positions.tolist() == [37, 38, 39] * 2
    assert step.query_start.tolist() == [0, 3, 6] and step.sample_rows.tolist() == [2, 5]
    assert step.block_tables.shape == (2, 2, 2) and step.block_tables.max() < 6


@pytest.mark.parametrize(("query", "context"), [(0, 4), (5, 4), (1, 129)])
def test_a_step_that_the_context_cannot_hold(query: int, context: int) -> None:
    with pytest.raises(StepDoesNotFit, match="128 tokens"):
        made_up_step(fake(), 1, query, context)


def test_the_rate_of_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the memory is read, its last chunk too; the rate is that of the fastest round."""
    monkeypatch.setattr("compilerllm.kernel_times.CHUNK_BYTES", 1024)
    monkeypatch.setattr("compilerllm.kernel_times.READ_SECONDS", 0.01)
    # The start, then for each round: whether there is time, before, after.
    clock = iter([0.0, 0.0, 0.0, 0.002, 0.002, 0.002, 0.003, 0.003, 0.003, 0.006, 0.02])
    monkeypatch.setattr("compilerllm.kernel_times.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    seen: list[int] = []
    total = torch.Tensor.sum

    def spy(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.nbytes)
        return total(tensor)

    monkeypatch.setattr(torch.Tensor, "sum", spy)
    backend: Any = SimpleNamespace(do=lambda work: work(), synchronize=lambda: None)
    memory = torch.zeros(2048 + 256, dtype=torch.uint8)
    assert read_rate(backend, memory) == pytest.approx(memory.nbytes / 0.001 / 1e9)
    assert seen[:3] == [1024, 1024, 256]


def test_bench_finds_what_it_needs() -> None:
    """``bench kernels`` and the floor in ``bench latency`` ask whether a model has these."""
    for wanted in (KernelTimer, Roofed):
        names = [name for name in vars(wanted) if not name.startswith("_")]
        assert names and not [name for name in names if not hasattr(CudaModel, name)]
