"""Norms, embedding and gathered rows against the reference in f32: kernels alone, and through emitters."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from compilerllm.ir.step import Bucket, StepInputs
from compilerllm.ir.text import parse_module
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.reference.fused_ops import add_layer_norm, add_rms_norm
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.kernels.triton.emit import draft_program
from compilerllm.kernels.triton.target import TARGETS
from tests.ir.op_samples import function
from tests.kernels.triton.harness import (
    TORCH,
    Guarded,
    Machine,
    assert_close,
    cross_compile,
    device,
    launch,
)


def random(*shape: int, dtype: str = "f32", seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(TORCH[dtype]).to(device())


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("kernel", ["norm", "norm_wide"])
@pytest.mark.parametrize(
    ("rows", "columns", "centre", "round_first", "offset"),
    [
        (1, 128, False, True, 0.0),
        (5, 100, False, False, 1.0),
        (3, 33, True, False, 0.0),
        (4, 7, False, True, 1.0),
    ],
)
def test_norms_with_a_residual(
    dtype: str, kernel: str, rows: int, columns: int, centre: bool, round_first: bool, offset: float
) -> None:
    """Tails in rows and columns, strided operands; the sum is exact, nothing outside is written."""
    both = random(rows, 2 * columns + 16, dtype=dtype)
    x, residual = both[:, :columns], both[:, columns + 8 : 2 * columns + 8]
    weight, bias = (
        random(columns, dtype=dtype, seed=1),
        random(columns, dtype=dtype, seed=2) if centre else None,
    )
    normed, total = (Guarded((rows, columns), TORCH[dtype]) for _ in range(2))
    per = 2 if kernel == "norm" else 1
    tile = {"ROWS": 2, "BLOCK": 128} if kernel == "norm" else {"BLOCK": 32}
    launch(
        f"norm:{kernel}", (-(-rows // per),),
        {
            "x": x, "residual": residual, "weight": weight, "bias": bias, "index": None, "normed": normed.tensor,
            "total": total.tensor, "rows": rows, "X_STRIDE": both.shape[1], "RESIDUAL_STRIDE": both.shape[1],
            "COLUMNS": columns, "EPS": 1e-5, "OFFSET": offset, "ROUND_FIRST": round_first, "CENTRE": centre, **tile,
        },
    )  # fmt: skip
    if centre:
        want, want_total = add_layer_norm(x, residual, weight, bias, eps=1e-5)
    else:
        want, want_total = add_rms_norm(x, residual, weight, eps=1e-5, offset=offset, round_first=round_first)
    assert torch.equal(total.check(), want_total)
    assert_close(normed.check(), want)


def test_norm_of_picked_rows() -> None:
    x, weight = random(6, 40), random(40, seed=1)
    index = torch.tensor([5, 0, 5], dtype=torch.int32, device=device())
    normed = Guarded((3, 40), torch.float32)
    launch(
        "norm:norm", (1,),
        {
            "x": x, "residual": None, "weight": weight, "bias": None, "index": index, "normed": normed.tensor, "total": None,
            "rows": 3, "X_STRIDE": 40, "RESIDUAL_STRIDE": 0, "COLUMNS": 40, "EPS": 1e-6, "OFFSET": 0.0,
            "ROUND_FIRST": False, "CENTRE": False, "ROWS": 4, "BLOCK": 64,
        },
    )  # fmt: skip
    want = torch.nn.functional.rms_norm(x[index.long()], (40,), weight, 1e-6)
    assert_close(normed.check(), want)


@pytest.mark.parametrize("scale", [None, 8.0])
def test_embedding_resolves_tokens_of_the_last_step(scale: float | None) -> None:
    table = random(50, 40, dtype="bf16")
    ids = torch.tensor([3, -1, 49, -3, 0], dtype=torch.int32, device=device())
    last = torch.tensor([11, 5, 22], dtype=torch.int32, device=device())
    out = Guarded((5, 40), torch.bfloat16)
    launch(
        "embed:embedding", (5, 2),
        {"ids": ids, "last_token": last, "table": table, "out": out.tensor, "COLUMNS": 40, "SCALE": scale, "BLOCK": 32},
    )  # fmt: skip
    want = table[[3, 11, 49, 22, 0]] * (1.0 if scale is None else scale)
    assert torch.equal(out.check(), want)


def ints(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


HEAD = function(
    "%step: step",
    """%i = step_field(%step, field="token_ids") : i32[T]
    %rows = step_field(%step, field="sample_rows") : i32[R]
    %x = embedding(%i, %table) : bf16[T, 24]
    %zero = full(shape=[T, 24], value=0.0, dtype="bf16") : bf16[T, 24]
    %n, %s = add_rms_norm(%x, %zero, %w, eps=1e-05, round_first=true) : bf16[T, 24], bf16[T, 24]
    %a = gather_rows(%n, %rows) : bf16[R, 24]
    %b = gather_rows(%s, %rows) : bf16[R, 24]
    %m, %t = add_rms_norm(%a, %b, %w, eps=1e-05) : bf16[R, 24], bf16[R, 24]
    %y = cast(%m, dtype="f32") : f32[R, 24]""",
    "%y",
    "param %table : bf16[30, 24]\nparam %w : bf16[24]",
)


def test_the_head_of_a_model_reads_sampled_rows_in_its_norm() -> None:
    """Neither the zero residual nor the gathers cost a launch; a padded bucket gives the same rows."""
    module = parse_module(HEAD)
    params = {"table": random(30, 24, dtype="bf16"), "w": random(24, dtype="bf16", seed=1)}
    step = StepInputs(
        token_ids=ints(4, -2, 29), positions=ints(0, 1, 0), query_start=ints(0, 2, 3), seq_lens=ints(2, 1),
        block_tables=np.zeros((1, 2, 1), np.int32), slots=ints(0, 1), sample_rows=ints(1, 2), adapter_id=ints(0, 0, 0),
    )  # fmt: skip
    machine = Machine(module, params, [Bucket(3, 2, 2, 32), Bucket(8, 4, 5, 32)])
    machine.last_token[:] = torch.arange(8) + 10
    want = Interpreter(module, {n: p.cpu() for n, p in params.items()}).run_step(
        step, {}, machine.last_token.cpu()
    )
    for plan in (0, 1):
        launches = [machine.program.kernels[x.kernel].template for x in machine.program.plans[plan].launches]
        assert [t.partition(":")[0] for t in launches[:3]] == ["embed", "norm", "norm"]
        assert len(launches) == 4
        (got,) = machine.run(plan, step)
        assert_close(got, want, 400.0)  # bf16 results, cast


def test_an_embedding_is_scaled_as_it_is_read() -> None:
    body = "%x = embedding(%i, %t) : bf16[T, 24]\n%y = mul(%x, scalar=2.3) : bf16[T, 24]"
    module = parse_module(function("%i: i32[T]", body, "%y", "param %t : bf16[30, 24]"))
    params, ids = {"t": random(30, 24, dtype="bf16")}, torch.tensor([3, 0, 29], dtype=torch.int32)
    machine = Machine(module, params, [Bucket(3, 1, 1, 32)])
    assert len(machine.program.plans[0].launches) == 1
    (got,) = machine.run(0, None, [ids])
    (want,) = Interpreter(module, {"t": params["t"].cpu()}).run(ids)
    assert torch.equal(got.cpu(), want)


def test_gathers_that_others_read_are_made() -> None:
    text = HEAD.replace("%y = cast(%m", "%u = add(%m, %a) : bf16[R, 24]\n  %y = cast(%u")
    (emitted,) = draft_program(parse_module(text), [Bucket(3, 2, 2, 32)], TARGETS[2]).buckets
    assert [c.source.template for c in emitted.calls if c.source].count("embed:gather_rows") == 2


def test_wide_rows_and_packed_tables() -> None:
    """Rows over what registers hold take the kernel with passes; a packed table is refused."""
    wide = function("%x: bf16[T, 20000]", "%y = rms_norm(%x, eps=1e-05) : bf16[T, 20000]", "%y")
    (emitted,) = draft_program(parse_module(wide), [Bucket(2, 1, 1, 32)], TARGETS[2]).buckets
    (call,) = emitted.calls
    assert call.source is not None and call.source.template == "norm:norm_wide"
    packed = function(
        "%i: i32[T]", '%y = embedding(%i, %t, dtype="bf16") : bf16[T, 64]', "%y", "param %t : q4_1[50, 64]"
    )
    with pytest.raises(UnsupportedByTarget, match="dense"):
        draft_program(parse_module(packed), [Bucket(2, 1, 1, 32)], TARGETS[2])


def test_a_weight_that_the_step_computes_is_not_read_before_the_wait() -> None:
    for weight, kernel in (("%w", "norm:norm"), ("%v", "norm:norm_wide")):
        body = f"%v = mul(%w, scalar=2.0) : f32[8]\n%y = rms_norm(%x, {weight}, eps=1e-05) : f32[T, 8]"
        text = function("%x: f32[T, 8]", body, "%y", "param %w : f32[8]")
        (emitted,) = draft_program(parse_module(text), [Bucket(2, 1, 1, 32)], TARGETS[2]).buckets
        assert emitted.calls[-1].source is not None and emitted.calls[-1].source.template == kernel


BF16: dict[str, Any] = dict.fromkeys(("x", "residual", "weight", "normed", "total"), "*bf16")


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_rows_compile_for_every_target(target: Any) -> None:
    norm = BF16 | {
        "bias": None, "index": "*i32", "rows": "i32", "X_STRIDE": 4096, "RESIDUAL_STRIDE": 4096, "COLUMNS": 4096, "EPS": 1e-5,
        "OFFSET": 0.0, "ROUND_FIRST": True, "CENTRE": False, "BLOCK": 4096,
    }  # fmt: skip
    embed = {
        "ids": "*i32",
        "last_token": "*i32",
        "table": "*bf16",
        "out": "*bf16",
        "COLUMNS": 4096,
        "SCALE": None,
        "BLOCK": 1024,
    }
    gather = {"x": "*bf16", "index": "*i32", "out": "*bf16", "STRIDE": 4096, "COLUMNS": 4096, "BLOCK": 1024}
    for pdl in (False, True)[: 1 + target.pdl]:
        facts = cross_compile(
            "norm:norm", norm | {"ROWS": 1}, capability=target.capability, num_warps=8, pdl=pdl
        )
        assert facts["early"] == ([2] if pdl else []), "the weight, and it alone, is read before the wait"
        cross_compile("norm:norm_wide", norm, capability=target.capability, num_warps=8, pdl=pdl)
        cross_compile("embed:embedding", embed, capability=target.capability, pdl=pdl)
        cross_compile("embed:gather_rows", gather, capability=target.capability, pdl=pdl)
