"""Token alignment and experts against the ATen reference, padded rows and biases included."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from compilerllm.ir.step import Bucket
from compilerllm.ir.text import parse_module
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.reference import model_ops
from compilerllm.kernels.triton import emit_experts
from compilerllm.kernels.triton.emit_experts import Candidate, Experts, candidates, power_of_two
from compilerllm.kernels.triton.emitter import BucketEmitter
from tests.kernels.triton.harness import (
    TARGET,
    Guarded,
    assert_close,
    cross_compile,
    device,
    launch,
    run_module,
)

NOWHERE = 1 << 40  # an expert that no memory holds


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device(), dtype)


@dataclass(frozen=True)
class Problem:
    """Tokens of which ``real`` are no padding, experts, experts a token, hidden and expert width."""

    tokens: int = 6
    real: int = 6
    experts: int = 5
    top: int = 2
    hidden: int = 24
    width: int = 20
    act: str = "silu"
    interleaved: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.float32

    def tensors(self, spread: str = "random") -> dict[str, Tensor]:
        """Operands by name; ids by ``spread``: random, one (all to one expert first), few (most experts empty)."""
        t, e, k = self.tokens, self.experts, self.top
        order = torch.rand(t, e, generator=torch.Generator().manual_seed(1)).argsort(-1)
        ids = {
            "random": order[:, :k],
            "one": torch.arange(k).expand(t, k) + e - k,
            "few": order[:1, :k].expand(t, k),
        }
        found = {
            "x": seeded(t, self.hidden, seed=2),
            "ids": ids[spread].contiguous().to(device()),
            "weights": seeded(t, k, seed=3).softmax(-1),
            "gate_up": seeded(e, 2 * self.width, self.hidden, seed=4) / 4,
            "down": seeded(e, self.hidden, self.width, seed=5) / 4,
        }
        if self.bias:
            found["gate_up_bias"] = seeded(e, 2 * self.width, seed=6)
            found["down_bias"] = seeded(e, self.hidden, seed=7)
        return {n: v if n == "ids" else v.to(self.dtype) for n, v in found.items()}

    def attrs(self) -> dict[str, Any]:
        if self.act != "gpt_oss":
            return {"act": self.act, "interleaved": self.interleaved}
        return {"act": self.act, "interleaved": self.interleaved, "limit": 1.5, "alpha": 1.702}

    def want(self, tensors: Mapping[str, Tensor]) -> Tensor:
        x, ids, weights = (tensors[n][: self.real].cpu() for n in ("x", "ids", "weights"))
        names = ("gate_up", "down", "gate_up_bias", "down_bias")
        gate_up, down, *biases = (tensors[n].cpu() for n in names if n in tensors)
        return model_ops.experts(x, ids, weights, gate_up, down, *biases, **self.attrs())

    def text(self) -> str:
        d = {torch.float32: "f32", torch.bfloat16: "bf16"}[self.dtype]
        h, f, e, k = self.hidden, self.width, self.experts, self.top
        biases = f"  param %gb : {d}[{e}, {2 * f}]\n  param %db : {d}[{e}, {h}]\n" if self.bias else ""
        extra = {n: {True: "true", False: "false"}.get(v, v) for n, v in self.attrs().items() if n != "act"}
        attrs = "".join(f", {n}={v}" for n, v in extra.items())
        return f"""func @main(%x: {d}[T, {h}], %i: i64[T, {k}], %w: {d}[T, {k}]) {{
  dim T in [1, 64]
  param %gu : {d}[{e}, {2 * f}, {h}]
  param %dn : {d}[{e}, {h}, {f}]
{biases}  %y = experts(%x, %i, %w, %gu, %dn{", %gb, %db" if self.bias else ""}, act="{self.act}"{attrs}) : {d}[T, {h}]
  return %y
}}"""

    def run(self, tensors: Mapping[str, Tensor], **options: Any) -> Tensor:
        """Through the emitter and the interpreter."""
        names = {"gate_up": "gu", "down": "dn", "gate_up_bias": "gb", "down_bias": "db"}
        params = {names[n]: v for n, v in tensors.items() if n in names}
        inputs = [tensors[n].contiguous() for n in ("x", "ids", "weights")]
        return run_module(self.text(), params, inputs, **options)[0]


class Take:
    """A chooser that takes the first candidate of one path, cut to small tiles."""

    def __init__(self, path: str, bm: int = 16) -> None:
        self.path, self.bm = path, bm

    def choose(self, family: str, problem: Mapping[str, int | str], found: Sequence[Candidate]) -> Candidate:
        chosen = next(c for c in found if c["path"] == self.path)
        small = {"gu_bn": 16, "gu_bk": 16, "down_bn": 16, "down_bk": 16}
        if self.path == "gemv":
            return chosen | {"gu_bn": 8, "gu_bk": 16, "down_bn": 8, "down_bk": 16}
        return chosen | small | {"bm": self.bm}


PATHS = [Take("gemv"), Take("grouped"), Take("grouped", 32)]
path = pytest.mark.parametrize("chooser", PATHS, ids=["gemv", "grouped", "blocks of 32"])


@path
@pytest.mark.parametrize(
    "problem",
    [
        Problem(),
        Problem(tokens=1, real=1, top=3, hidden=32, width=16),
        Problem(tokens=19, real=19, experts=3, top=2, act="gelu_tanh"),
        Problem(act="gpt_oss", interleaved=True, bias=True),
        Problem(act="relu", bias=True, top=1),
    ],
    ids=["tails", "one token", "several blocks", "gpt_oss", "bias"],
)
def test_experts(problem: Problem, chooser: Take) -> None:
    tensors = problem.tensors()
    assert_close(problem.run(tensors, chooser=chooser), problem.want(tensors))


@path
@pytest.mark.parametrize("spread", ["one", "few"])
def test_empty_experts(spread: str, chooser: Take) -> None:
    problem = Problem(tokens=18, real=18, experts=7)
    tensors = problem.tensors(spread)
    assert_close(problem.run(tensors, chooser=chooser), problem.want(tensors))


@path
@pytest.mark.parametrize("act", ["silu", "gpt_oss"])
def test_bf16_rounds_as_the_reference(act: str, chooser: Take) -> None:
    problem = Problem(
        tokens=8, real=8, top=4, act=act, bias=act == "gpt_oss", dtype=torch.bfloat16, hidden=32, width=32
    )
    tensors = problem.tensors()
    got, want = problem.run(tensors, chooser=chooser), problem.want(tensors)
    # The same roundings in the same order: only a sum that falls on the other side of a tie differs.
    assert (got != want).float().mean() < 0.05
    assert_close(got, want)


def test_many_slots_are_placed_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(tokens=45, real=45, experts=6, top=3, hidden=16, width=16)
    tensors = problem.tensors()
    chooser = Take("grouped")
    at_once = problem.run(tensors, chooser=chooser)
    monkeypatch.setattr(emit_experts, "ALIGNED_AT_ONCE", 0)
    monkeypatch.setattr(emit_experts, "CHUNK", 32)
    by_chunks = problem.run(tensors, chooser=chooser)
    assert_close(at_once, problem.want(tensors))
    assert torch.equal(at_once, by_chunks)


# -- alignment and padded rows ----------------------------------------------------------------------------------------


def aligned(
    ids: Tensor, real: int, experts: int, bm: int, chunk: int = 0
) -> tuple[list[list[int]], list[int]]:
    """Blocks of slots and their experts, as the kernels list them; by chunks where ``chunk`` says."""
    rows, top = ids.shape
    bound = min(rows * top, rows * top // bm + experts)
    slots, owners = Guarded((bound, bm), torch.int32), Guarded((bound,), torch.int32)
    used = Guarded((1,), torch.int32)
    args: dict[str, Any] = {
        "ids": ids.contiguous(), "slots": slots.tensor, "owners": owners.tensor, "used": used.tensor,
        "meta": torch.tensor([real, 0, 0, 0], dtype=torch.int32, device=device()), "rows": rows, "TOP": top,
        "E2": power_of_two(experts), "BM": bm, "COUNT": 0,
    }  # fmt: skip
    if chunk:
        chunks = -(-rows * top // chunk)
        counts = Guarded((chunks, power_of_two(experts)), torch.int32)
        args |= {"counts": counts.tensor, "CHUNK": chunk}
        launch(
            "align:count_chunks",
            (chunks,),
            {n: v for n, v in args.items() if n not in ("slots", "owners", "used", "BM")},
        )
        launch("align:place_chunks", (chunks,), {**args, "chunks": chunks, "STEP": 4, "PART": 2})
        counts.check()
    else:
        blocks = power_of_two(-(-rows * top // bm))
        launch("align:align", (experts,), {**args, "N2": power_of_two(rows * top), "BLOCKS2": blocks})
    count = int(used.check()[0])
    return slots.check()[:count].tolist(), owners.check()[:count].tolist()


@pytest.mark.parametrize("chunk", [0, 8, 64])
@pytest.mark.parametrize("real", [0, 1, 13])
def test_alignment_is_stable_and_leaves_padding_out(real: int, chunk: int) -> None:
    experts, bm, top = 5, 4, 3
    ids = (
        torch.rand(13, experts, generator=torch.Generator().manual_seed(0)).argsort(-1)[:, :top].to(device())
    )
    ids[real:] = NOWHERE
    blocks, owners = aligned(ids, real, experts, bm, chunk)
    want_blocks, want_owners = [], []
    flat = ids[:real].flatten().tolist()
    for expert in range(experts):
        mine = [i for i, owner in enumerate(flat) if owner == expert]
        for start in range(0, len(mine), bm):
            part = mine[start : start + bm]
            want_blocks.append(part + [-1] * (bm - len(part)))
            want_owners.append(expert)
    assert (blocks, owners) == (want_blocks, want_owners)


def padded(problem: Problem) -> dict[str, Any]:
    """Arguments with rows behind the real ones that would read anything if anybody looked at them."""
    tensors = problem.tensors()
    tensors["ids"][problem.real :] = NOWHERE
    tensors["x"][problem.real :] = float("nan")
    tensors["weights"][problem.real :] = float("inf")
    meta = torch.tensor([problem.real, 0, 0, 0], dtype=torch.int32, device=device())
    return {**tensors, "meta": meta, "rows": problem.tokens}


@pytest.mark.parametrize("real", [1, 4])
def test_padded_rows_load_no_expert(real: int) -> None:
    problem = Problem(tokens=6, real=real, hidden=16, width=16)
    args = padded(problem)
    t, k, h, f = problem.tokens, problem.top, problem.hidden, problem.width
    want = problem.want({n: args[n] for n in ("x", "ids", "weights", "gate_up", "down")})
    both = {
        "STRIDE": h, "K": h, "F": f, "TOP": k, "STEP": 1, "UP": f, "ACT": "silu", "LIMIT": 7.0, "ALPHA": 1.0,
        "BIAS": False, "x": args["x"], "weight": args["gate_up"], "bias": args["gate_up"],
    }  # fmt: skip
    live = {"ids": args["ids"], "meta": args["meta"], "rows": t, "COUNT": 0}
    down = {
        "H": h,
        "F": f,
        "BIAS": False,
        "weights": args["weights"],
        "weight": args["down"],
        "bias": args["down"],
    }
    hidden, out = Guarded((t * k, f), torch.float32), Guarded((t, h), torch.float32)
    launch("experts:gate_up_gemv", (t * k, 2), {**both, **live, "h": hidden.tensor, "BN": 8, "BK": 16})
    assert hidden.check()[real * k :].isnan().all(), "slots of padded rows stay as they were"
    launch(
        "experts:down_gemv",
        (t, 1),
        {**down, **live, "h": hidden.tensor, "out": out.tensor, "TOP": k, "TOP2": 2, "BN": 16, "BK": 16},
    )
    assert_close(out.check()[:real], want)
    assert not out.check()[real:].any()

    bm, bound = 16, min(t * k, t * k // 16 + problem.experts)
    lists = {
        "slots": Guarded((bound, bm), torch.int32), "owners": Guarded((bound,), torch.int32),
        "used": Guarded((1,), torch.int32),
    }  # fmt: skip
    listed = {n: g.tensor for n, g in lists.items()}
    launch(
        "align:align",
        (problem.experts,),
        {**live, **listed, "TOP": k, "E2": 8, "N2": 16, "BM": bm, "BLOCKS2": 1},
    )
    hidden, y, out = (
        Guarded((t * k, f), torch.float32),
        Guarded((t * k, h), torch.float32),
        Guarded((t, h), torch.float32),
    )
    tile = {"BM": bm, "BN": 16, "BK": 16}
    launch("experts:grouped_gate_up", (1, bound), {**both, **listed, "h": hidden.tensor, **tile})
    launch("experts:grouped_down", (1, bound), {**down, **listed, "h": hidden.tensor, "y": y.tensor, **tile})
    assert hidden.check()[real * k :].isnan().all()
    assert y.check()[real * k :].isnan().all()
    launch(
        "experts:combine",
        (t, 1),
        {**live, "y": y.tensor, "out": out.tensor, "H": h, "TOP": k, "TOP2": 2, "BN": 16},
    )
    assert_close(out.check()[:real], want)
    assert not out.check()[real:].any()


# -- choices ---------------------------------------------------------------------------------------------------------

QWEN = Problem(tokens=8, experts=128, top=8, hidden=2048, width=768, dtype=torch.bfloat16)


def choices(tokens: int, problem: Problem = QWEN, shared: int = TARGET.shared) -> list[Candidate]:
    module = parse_module(problem.text())
    e = BucketEmitter(module, Bucket(tokens, tokens, tokens, tokens), TARGET, (None,))
    return candidates(Experts(e, module.main.nodes[-1]), shared)


def test_few_slots_run_as_gemv_and_many_in_larger_blocks() -> None:
    assert [choices(t)[0]["path"] for t in (1, 8, 16, 64)] == ["gemv", "gemv", "grouped", "grouped"]
    assert [choices(t)[0]["bm"] for t in (16, 64, 256, 1024, 8192)] == [16, 16, 32, 64, 128]
    assert not any(c["path"] == "gemv" for c in choices(64))


def test_a_small_chip_has_fewer_candidates_but_some() -> None:
    assert all(choices(tokens, shared=101_376) for tokens in (1, 64, 8192))
    assert len(choices(8192, shared=101_376)) < len(choices(8192))


def test_packed_experts_are_refused_with_what_to_do() -> None:
    text = (
        Problem(hidden=32, width=32)
        .text()
        .replace("%gu : f32", "%gu : q8_0")
        .replace("%dn : f32", "%dn : q8_0")
    )
    with pytest.raises(UnsupportedByTarget, match="experts of q8_0 for f32 activations have no CUDA kernel"):
        run_module(text, {}, [torch.zeros(1, 32), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2)])


# -- cross-compilation -----------------------------------------------------------------------------------------------

_POINTERS = {"x": "bf16", "weight": "bf16", "bias": "bf16", "h": "bf16", "y": "bf16", "out": "bf16", "weights": "bf16",
             "ids": "i64", "meta": "i32", "slots": "i32", "owners": "i32", "used": "i32", "counts": "i32"}  # fmt: skip
_BOTH = {
    "STRIDE": 2048,
    "K": 2048,
    "F": 768,
    "TOP": 8,
    "STEP": 1,
    "UP": 768,
    "ACT": "silu",
    "LIMIT": 7.0,
    "ALPHA": 1.702,
}
_LISTED = ("slots", "owners", "used")
COMPILED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "experts:gate_up_gemv": (
        ("x", "ids", "weight", "bias", "h", "meta"),
        {**_BOTH, "BIAS": False, "COUNT": 0, "BN": 2, "BK": 1024, "rows": "i32"},
    ),
    "experts:down_gemv": (
        ("h", "ids", "weights", "weight", "bias", "out", "meta"),
        {"H": 2048, "F": 768, "TOP": 8, "TOP2": 8, "BIAS": True, "COUNT": 0, "BN": 2, "BK": 256, "rows": "i32"},
    ),
    "experts:grouped_gate_up": (
        ("x", *_LISTED, "weight", "bias", "h"),
        {**_BOTH, "ACT": "gpt_oss", "STEP": 2, "UP": 1, "BIAS": True, "BM": 16, "BN": 64, "BK": 64},
    ),
    "experts:grouped_down": (
        ("h", *_LISTED, "weights", "weight", "bias", "y"),
        {"H": 2048, "F": 768, "BIAS": False, "BM": 64, "BN": 64, "BK": 64},
    ),
    "experts:combine": (
        ("y", "ids", "out", "meta"), {"H": 2048, "TOP": 8, "TOP2": 8, "COUNT": 0, "BN": 2048, "rows": "i32"},
    ),
    "align:align": (
        ("ids", *_LISTED, "meta"),
        {"TOP": 8, "E2": 128, "N2": 4096, "BM": 16, "BLOCKS2": 256, "COUNT": 0, "rows": "i32"},
    ),
    "align:count_chunks": (
        ("ids", "counts", "meta"), {"TOP": 8, "E2": 128, "CHUNK": 512, "COUNT": 0, "rows": "i32"},
    ),
    "align:place_chunks": (
        ("ids", "counts", *_LISTED, "meta"),
        {"TOP": 8, "E2": 128, "BM": 128, "CHUNK": 512, "STEP": 32, "PART": 32, "COUNT": 0, "rows": "i32", "chunks": "i32"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("template", COMPILED)
def test_cross_compiles(template: str) -> None:
    pointers, rest = COMPILED[template]
    args = {n: f"*{_POINTERS[n]}" for n in pointers} | rest
    for capability, pdl in ((80, False), (90, True), (100, True)):
        meta = cross_compile(template, args, capability=capability, pdl=pdl)
        assert meta["shared"] <= 101_376
