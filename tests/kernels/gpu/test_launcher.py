"""Plans packed for the driver, with a launch function that reads the memory it is pointed to."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compilerllm.ir.step import Bucket
from compilerllm.kernels.errors import ArtifactError
from compilerllm.kernels.launch.gpu.driver import KernelFault
from compilerllm.kernels.launch.gpu.launcher import CONFIG, PackedPlan, slot_value
from compilerllm.kernels.launch.gpu.program import Addresses, Extent, Kernel, Launch, Plan, Pointer

BUCKET = Bucket(8, 4, 2, 8)
KERNELS = (
    Kernel("a", "ka", "m:a", ("*bf16", "i32", "fp32"), 4, 1024, True),
    Kernel("b", "kb", "m:b", ("*i32",), 8),
    Kernel("", "", "library:matmul", ("*fp32", "*fp32", "*fp32", "i32"), constexprs=(("k", 2), ("n", 3))),
)
NOWHERE = Addresses()
Told = tuple[int, tuple[int, ...], tuple[int, ...], int, int, tuple[int, ...]]


class FakeLaunch:
    """Reads configuration and parameters as the driver would; gives the codes it is told, then 0."""

    def __init__(self, counts: dict[int, int], codes: Sequence[int] = ()) -> None:
        self.counts, self.codes = counts, list(codes)
        self.told: list[Told] = []

    def __call__(self, config: int, function: int, parameters: int, extra: int) -> int:
        assert extra == 0
        c = np.frombuffer(ctypes.string_at(config, CONFIG.itemsize), CONFIG)[0]
        pointers = (ctypes.c_uint64 * self.counts[function]).from_address(parameters)
        values = tuple(ctypes.c_int64.from_address(p).value for p in pointers)
        grid, block = tuple(c["grid"].tolist()), tuple(c["block"].tolist())
        self.told.append((function, grid, block, int(c["shared"]), int(c["count"]), values))
        return self.codes.pop(0) if self.codes else 0


def pack(
    launches: Sequence[Launch], launch: Any, addresses: Addresses = NOWHERE, tensor: Any = None
) -> PackedPlan:
    plan = Plan(BUCKET, 0, tuple(launches))
    return PackedPlan(plan, KERNELS, (101, 102, 0), addresses, launch, 5, tensor, Path())


def two_launches(codes: Sequence[int] = ()) -> tuple[PackedPlan, FakeLaunch]:
    launch = FakeLaunch({101: 5, 102: 3}, codes)
    addresses = Addresses(
        params={"w": 4096}, arena=8192, step_base=512, step={"positions": 64}, states={"kv": 1 << 40}
    )
    a = Launch(
        0, (Extent("T", 4), 2, 1), (Pointer("param", "w", 16), Extent("T"), 1.5), "%1 = linear  [layers.3]"
    )
    b = Launch(1, (Extent("R"), 1, 1), (Pointer("step", "positions"),), "%2 = rows")
    return pack([a, b], launch, addresses), launch


def test_arguments_grid_and_configuration() -> None:
    """At first for the bucket's own sizes; two null scratch pointers follow a kernel's arguments."""
    plan, launch = two_launches()
    plan.run()
    one_and_a_half = int.from_bytes(np.float32(1.5).tobytes(), "little")
    assert launch.told == [
        (101, (2, 2, 1), (128, 1, 1), 1024, 1, (4112, 8, one_and_a_half, 0, 0)),
        (102, (2, 1, 1), (256, 1, 1), 0, 0, (576, 0, 0)),
    ]


def test_exact_sizes() -> None:
    """Extents follow the step; a launch with an empty grid is left out, and comes back."""
    plan, launch = two_launches()
    plan.size({"T": 5, "S": 1, "R": 0})
    plan.run()
    assert [(t[0], t[1], t[5][1]) for t in launch.told] == [(101, (2, 2, 1), 5)]
    plan.size({"T": 1, "S": 1, "R": 1})
    launch.told.clear()
    plan.run()
    assert [(t[0], t[1]) for t in launch.told] == [(101, (1, 2, 1)), (102, (1, 1, 1))]
    assert [x.node for x in plan.launches] == ["%1 = linear  [layers.3]", "%2 = rows"]


def test_refused_launch_names_node_and_module() -> None:
    plan, _ = two_launches([0, 1])
    with pytest.raises(KernelFault, match=r"m:b of %2 = rows failed in the bucket of 8 tokens: .*CUresult 1"):
        plan.run()
    plan, _ = two_launches([701])
    with pytest.raises(KernelFault, match=r"m:a of %1 = linear  \[layers\.3\]"):
        plan.run_checked(lambda: None)


def test_checked_run_finds_the_kernel_that_fails_later() -> None:
    """The driver takes the launch; waiting after it tells."""
    plan, launch = two_launches()

    def wait() -> None:
        if len(launch.told) == 2:
            raise KernelFault("illegal address")

    with pytest.raises(KernelFault, match=r"m:b of %2 = rows failed .* illegal address"):
        plan.run_checked(wait)


def test_arguments_that_do_not_fit_the_kernel() -> None:
    with pytest.raises(ArtifactError, match="takes 1 arguments, its launch gives 2"):
        pack([Launch(1, (1, 1, 1), (1, 2))], None)
    with pytest.raises(ArtifactError, match="param 'w', which the model does not have"):
        pack([Launch(1, (1, 1, 1), (Pointer("param", "w"),))], None)


@pytest.mark.parametrize(
    ("type", "value", "expected"),
    [
        ("i32", -2, -2), ("*bf16", 1 << 63, -(1 << 63)), ("u64", (1 << 64) - 1, -1), ("fp32", 1.0, 0x3F800000),
        ("fp16", 1.0, 0x3C00), ("bf16", 1.01, 0x3F81), ("fp64", -2.0, -(1 << 62)), ("i1", True, 1),
    ],
)  # fmt: skip
def test_slots(type: str, value: float, expected: int) -> None:
    assert slot_value(type, value) == expected


def test_matmul_runs_at_the_step_s_rows() -> None:
    """Over the program's memory, for as many rows as the step has; none are no call."""
    x, w, out = torch.randn(4, 2), torch.randn(3, 2), torch.full((4, 3), 7.0)
    memory = {t.data_ptr(): t for t in (x, w, out)}

    def tensor(address: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        assert dtype == torch.float32
        return memory[address].view(-1)[: shape[0] * shape[1]].view(*shape)

    addresses = Addresses(params={"w": w.data_ptr()}, arena=x.data_ptr(), logits=out.data_ptr())
    args = (Pointer("arena"), Pointer("param", "w"), Pointer("logits"), Extent("R", 1, 2))
    plan = pack([Launch(2, (1, 1, 1), args)], None, addresses, tensor)
    plan.run()
    torch.testing.assert_close(out, x @ w.t())
    out.fill_(7.0)
    plan.size({"T": 1, "S": 1, "R": 1})
    plan.run()
    torch.testing.assert_close(out[:2], x[:2] @ w.t())
    assert bool((out[2:] == 7.0).all())
    plan.size({"T": 1, "S": 1, "R": 0})
    plan.run()
