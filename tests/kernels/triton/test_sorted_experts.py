"""Experts by grouped products over rows sorted by expert; the products themselves are torch's here."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from compilerllm.ir.step import Bucket
from compilerllm.ir.text import parse_module
from compilerllm.kernels.cutlass.build import find_supply
from compilerllm.kernels.cutlass.candidates import grouped_candidates, grouped_workspace
from compilerllm.kernels.cutlass.supply import NONE, Supply
from compilerllm.kernels.launch.gpu.libraries import MAKERS, LibraryCall
from compilerllm.kernels.triton import emit_experts, interpret
from compilerllm.kernels.triton.emit import cutlass_cache, draft_program
from tests.kernels.triton.harness import (
    KERNELS,
    NATIVE,
    TARGET,
    Guarded,
    assert_close,
    cross_compile,
    device,
    launch,
)
from tests.kernels.triton.test_experts import NOWHERE, Problem, seeded

ALL = Supply(builds=True)
BF16 = torch.bfloat16


class Take:
    """The first CUTLASS candidate; notes what there was."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def choose(
        self, family: str, problem: Mapping[str, int | str], found: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        self.seen = list(found)
        return next((c for c in found if c["path"] == "cutlass"), found[0])


def grouped_product(call: LibraryCall) -> Callable[[], object]:
    """What an instance computes, by torch, from the call's arguments in their order; other rows become NaN."""
    groups, n, k, m = *(int(call.fixed[f]) for f in ("groups", "n", "k")), int(call.values[5])
    a, b, out = call.operand(0, (m, k)), call.operand(1, (groups, n, k)), call.operand(3, (m, n))
    offsets = call.operand(2, (groups + 1,))
    assert call.kernel.types[2] == "*i32" and call.fixed["workspace"] == grouped_workspace(groups)

    def run() -> None:
        spans = enumerate(pairwise(offsets.tolist()))
        made = [a[i:j].float() @ b[e].float().t() for e, (i, j) in spans]
        out.fill_(float("nan"))
        if made:
            whole = torch.cat(made)
            out[: len(whole)] = whole.to(out.dtype)

    return run


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if NATIVE:
        pytest.skip("the products are torch's on the CPU")
    monkeypatch.setitem(MAKERS, "cutlass_grouped_gemm", grouped_product)
    monkeypatch.setattr(interpret, "_ON_CPU", ("cutlass_grouped_gemm",))
    monkeypatch.setattr(emit_experts, "ROWS_OF_AN_EXPERT", 0)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("spread", ["random", "one", "few"])
@pytest.mark.parametrize("at_once", [4096, 4], ids=["at once", "in chunks"])
def test_experts(spread: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit_experts, "ALIGNED_AT_ONCE", at_once)
    for problem in (Problem(width=24, dtype=BF16), Problem(7, 7, 4, 3, 40, 16, "gelu_tanh", dtype=BF16)):
        tensors = problem.tensors(spread)
        got = problem.run(tensors, chooser=Take(), level=3, cutlass=ALL)
        assert_close(got, problem.want(tensors))


@pytest.mark.usefixtures("on_cpu")
def test_one_token() -> None:
    problem = Problem(1, 1, 4, 2, width=24, dtype=BF16)
    tensors = problem.tensors()
    assert_close(problem.run(tensors, chooser=Take(), level=3, cutlass=ALL), problem.want(tensors))


def sorted_rows(owners: list[int], slots: list[int], padded: int, count: int, top: int) -> dict[str, Tensor]:
    """Through the template, on poisoned results between guards."""
    tokens, hidden = -(-padded // top), 24
    x = seeded(tokens, hidden, seed=1)
    made = {
        "rows": Guarded((padded, hidden), torch.float32), "places": Guarded((padded,), torch.int32),
        "offsets": Guarded((count + 1,), torch.int32),
    }  # fmt: skip

    def listed(values: list[int]) -> Tensor:
        return torch.tensor(values + [-7] * (padded - len(values)), dtype=torch.int32, device=device())

    used = torch.tensor([len(slots)], dtype=torch.int32, device=device())
    launch(
        "sorted_experts:sort_rows", (padded, 2),
        {"x": x, "slots": listed(slots), "owners": listed(owners), "used": used, "STRIDE": hidden, "H": hidden,
         "TOP": top, "EXPERTS": count, "E2": 8, "BN": 16, **{n: g.tensor for n, g in made.items()}},
    )  # fmt: skip
    return {"x": x} | {n: g.check() for n, g in made.items()}


def test_rows_are_sorted_and_empty_experts_have_their_place() -> None:
    slots = [3, 0, 5, 1]
    found = sorted_rows([1, 3, 3, 4], slots, 8, 6, 2)
    assert found["offsets"].tolist() == [0, 0, 1, 1, 3, 4, 4]
    assert torch.equal(found["rows"][:4], found["x"][torch.tensor(slots) // 2])
    assert bool(found["rows"][4:].isnan().all())
    assert [found["places"][s].item() for s in slots] == [0, 1, 2, 3]
    assert all(found["places"][s].item() == -77 for s in (2, 4, 6, 7))


def test_no_rows_are_no_places() -> None:
    found = sorted_rows([], [], 4, 6, 2)
    assert found["offsets"].tolist() == [0] * 7 and bool(found["rows"].isnan().all())


def test_padded_rows_become_zero() -> None:
    rows, top, hidden = 3, 2, 24
    y, weights = seeded(4, hidden, seed=2), seeded(rows, top, seed=3)
    ids = torch.tensor([[4, 1], [0, 4], [NOWHERE, NOWHERE]], device=device())
    places = torch.tensor([2, 1, 0, 3, NOWHERE % 7919, -1], dtype=torch.int32, device=device())
    out, meta = Guarded((rows, hidden), torch.float32), torch.tensor([2], dtype=torch.int32, device=device())
    launch(
        "sorted_experts:combine_sorted", (rows, 2),
        {"y": y, "ids": ids, "weights": weights, "places": places, "out": out.tensor, "meta": meta, "rows": rows,
         "H": hidden, "TOP": top, "TOP2": 2, "COUNT": 0, "BN": 16},
    )  # fmt: skip
    want = torch.zeros(rows, hidden)
    for token in range(2):
        want[token] = sum(weights[token, j] * y[places[token * top + j]] for j in range(top))
    assert_close(out.check(), want)


def on_gpu(place: int) -> Supply:
    """The library that there is, or what builds one."""
    supply = find_supply(cutlass_cache(KERNELS))
    (instance,) = grouped_candidates(48, 24)[place : place + 1]
    if not NATIVE or not supply.has(instance):
        pytest.skip(supply.reason or "needs an H100 or H200")
    return Supply(kept=frozenset((instance.name,)))


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("spread", ["random", "one", "few"])
def test_on_the_gpu(spread: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    supply = on_gpu(place)
    monkeypatch.setattr(emit_experts, "ROWS_OF_AN_EXPERT", 0)
    for problem in (Problem(width=24, dtype=BF16), Problem(300, 300, 6, 3, 136, 72, dtype=BF16)):
        tensors = problem.tensors(spread)
        got = problem.run(tensors, chooser=Take(), level=3, cutlass=supply)
        assert_close(got, problem.want(tensors))


@pytest.mark.parametrize("pdl", [False, True])
def test_templates_compile(pdl: bool) -> None:
    rows = {"x": "*bf16", "rows": "*bf16", "STRIDE": 2048, "E2": 256, "EXPERTS": 128}
    ints = dict.fromkeys(("slots", "owners", "used", "places", "offsets"), "*i32")
    sizes = {"H": 2048, "TOP": 8, "BN": 2048}
    cross_compile("sorted_experts:sort_rows", {**rows, **ints, **sizes}, pdl=pdl)
    pointers = {
        "y": "*bf16",
        "ids": "*i64",
        "weights": "*bf16",
        "places": "*i32",
        "out": "*bf16",
        "meta": "*i32",
    }
    scalars = {"rows": "i32", "TOP2": 8, "COUNT": 0}
    cross_compile("sorted_experts:combine_sorted", {**pointers, **scalars, **sizes}, pdl=pdl)


def offered(problem: Problem, supply: Supply = ALL, level: int = 3) -> list[str]:
    chooser, tokens = Take(), problem.tokens
    bucket = Bucket(tokens, tokens, tokens, tokens)
    text = problem.text().replace("[1, 64]", "[1, 4096]")
    draft_program(parse_module(text), [bucket], TARGET, level, chooser, cutlass=supply)
    return [c["instance"] for c in chooser.seen if c["path"] == "cutlass"]


def test_offered_where_experts_have_rows_and_nothing_comes_between() -> None:
    many = Problem(64, 64, 4, 2, 24, 24, dtype=BF16)
    names = [i.name for i in grouped_candidates(48, 24)]
    assert offered(many) == names
    assert offered(many, supply=Supply(kept=frozenset(names[:1]))) == names[:1]
    assert offered(many, supply=NONE) == offered(many, level=2) == []
    for other in (
        Problem(63, 63, 4, 2, 24, 24, dtype=BF16), Problem(64, 64, 4, 2, 24, 24),
        Problem(64, 64, 4, 2, 24, 20, dtype=BF16), Problem(64, 64, 4, 2, 24, 24, bias=True, dtype=BF16),
        Problem(64, 64, 4, 2, 24, 24, interleaved=True, dtype=BF16),
    ):  # fmt: skip
        assert offered(other) == []
