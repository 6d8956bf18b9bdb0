"""Sampling against an oracle that follows the documented scheme in float64."""

import ctypes
import math
from dataclasses import dataclass, field

import pytest
import torch

from .library import TARGETS, address, build


class Row(ctypes.Structure):
    _fields_ = [
        ("temperature", ctypes.c_float),
        ("top_k", ctypes.c_int),
        *[(name, ctypes.c_float) for name in ("top_p", "min_p", "repetition", "presence", "frequency")],
        ("seed", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        *[(name, ctypes.c_void_p) for name in ("output_counts", "prompt_tokens", "bias_ids", "biases")],
        ("bias_count", ctypes.c_int),
        ("banned", ctypes.c_void_p),
        ("banned_count", ctypes.c_int),
        ("mask", ctypes.c_void_p),
        ("target", ctypes.c_int),
        ("logprobs", ctypes.c_int),
        ("top_ids", ctypes.c_void_p),
        ("top_logprobs", ctypes.c_void_p),
    ]


class Result(ctypes.Structure):
    _fields_ = [("token", ctypes.c_int), ("logprob", ctypes.c_float), ("rank", ctypes.c_int)]


class Call(ctypes.Structure):
    _fields_ = [
        ("logits", ctypes.c_void_p),
        ("R", ctypes.c_int),
        ("V", ctypes.c_int),
        ("rows", ctypes.c_void_p),
        ("results", ctypes.c_void_p),
    ]


@dataclass
class Params:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    position: int = 0
    logprobs: int = -1
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def row(self) -> Row:
        row = Row()
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition",
            "presence",
            "frequency",
            "seed",
            "position",
        ):
            setattr(row, name, getattr(self, name))
        row.logprobs, row.target = self.logprobs, -1
        for name, tensor in self.tensors.items():
            setattr(row, name, address(tensor))
        row.bias_count = len(self.tensors.get("biases", ()))
        row.banned_count = len(self.tensors.get("banned", ()))
        return row


def run(
    logits: torch.Tensor, params: list[Params], target: str = TARGETS[0], threads: int = 2
) -> list[Result]:
    library = build("rows_lib.cpp", target)
    library.sample_row_bytes.restype = ctypes.c_size_t
    assert library.sample_row_bytes() == ctypes.sizeof(Row)
    rows = (Row * len(params))(*[p.row() for p in params])
    results = (Result * len(params))()
    call = Call(
        address(logits), len(params), logits.shape[1], ctypes.addressof(rows), ctypes.addressof(results)
    )
    library.sample_rows(threads, ctypes.byref(call))
    return list(results)


def philox(seed: int, position: int) -> float:
    c = [position & 0xFFFFFFFF, position >> 32, 0, 0]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k1, a & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return ((c[1] << 32 | c[0]) >> 11) / 2**53


def kept(logits: torch.Tensor, p: Params) -> torch.Tensor:
    """Probabilities [V] after the filters, not normalised; float64 (thresholds on float32 z, as the kernel's)."""
    z = logits / torch.tensor(p.temperature)
    keep = torch.ones_like(z, dtype=torch.bool)
    if p.min_p > 0:
        keep &= z >= z.max() + math.log(p.min_p)
    if 0 < p.top_k < z.numel():
        keep &= z >= z.sort(descending=True).values[p.top_k - 1]
    mass = torch.where(keep, (z - z.max()).double().exp(), 0.0)
    if p.top_p < 1:
        order = z.masked_fill(~keep, float("-inf")).sort(descending=True)
        reached = mass[order.indices].cumsum(0) >= p.top_p * mass.sum()
        keep &= z >= order.values[int(reached.int().argmax())]
    return torch.where(keep, mass, 0.0)


CASES = {
    "plain": Params(),
    "cold": Params(temperature=0.3),
    "top-k": Params(top_k=7),
    "top-k beyond the group bound": Params(top_k=900),
    "top-p": Params(top_p=0.8),
    "flat top-p": Params(temperature=50.0, top_p=0.95),
    "min-p": Params(min_p=0.05),
    "all filters": Params(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_follow_the_oracle(case: str) -> None:
    g = torch.Generator().manual_seed(8)
    V = 1003  # no multiple of 16
    base = CASES[case]
    logits = 3 * torch.randn(40, V, generator=g)
    params = [
        Params(base.temperature, base.top_k, base.top_p, base.min_p, seed=2**40 + i, position=3 * i)
        for i in range(40)
    ]
    for r, result in enumerate(run(logits, params)):
        mass = kept(logits[r], params[r])
        cumulative = mass.cumsum(0)
        target = philox(params[r].seed, params[r].position) * cumulative[-1]
        assert mass[result.token] > 0
        # The token's interval holds the target, up to the rounding of float32 terms.
        slack = 1e-5 * float(cumulative[-1])
        assert (
            cumulative[result.token] >= target - slack
            and cumulative[result.token] - mass[result.token] <= target + slack
        )


@pytest.mark.parametrize("target", TARGETS)
def test_greedy_takes_the_lowest_of_equals(target: str) -> None:
    logits = torch.zeros(2, 100)
    logits[0, [37, 99]] = 5.0
    logits[1] = -3.0
    tokens = [r.token for r in run(logits, [Params(0.0), Params(0.0)], target)]
    assert tokens == [37, 0]


def test_frequencies_match_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]]).repeat(20000, 1)
    tokens = [r.token for r in run(logits, [Params(seed=7, position=i) for i in range(20000)])]
    share = torch.bincount(torch.tensor(tokens), minlength=5) / 20000
    assert (share - logits[0].softmax(0)).abs().max() < 0.015


def test_penalties_biases_bans_and_mask() -> None:
    g = torch.Generator().manual_seed(1)
    V = 77
    logits = torch.randn(1, V, generator=g)
    counts = torch.randint(0, 3, (V,), generator=g, dtype=torch.int32)
    prompt = torch.randint(0, 2, (V,), generator=g, dtype=torch.uint8)
    seen = (counts > 0) | (prompt > 0)
    want = torch.where(seen, torch.where(logits[0] > 0, logits[0] / 1.3, logits[0] * 1.3), logits[0])
    want = want - 0.4 * counts - 0.7 * (counts > 0)
    want[3] += 2.5
    banned = torch.tensor([int(want.argmax())], dtype=torch.int32)
    want[banned.long()] = float("-inf")
    words = torch.zeros(3, dtype=torch.int64)
    for i in range(V):
        if i % 5:
            words[i // 32] |= 1 << (i % 32)
    want[::5] = float("-inf")
    mask = words.to(torch.uint32)
    tensors = {"output_counts": counts, "prompt_tokens": prompt, "bias_ids": torch.tensor([3], dtype=torch.int32),
               "biases": torch.tensor([2.5]), "banned": banned, "mask": mask}  # fmt: skip
    before = logits.clone()
    params = Params(0.0, repetition=1.3, presence=0.7, frequency=0.4, tensors=tensors)
    assert run(logits, [params])[0].token == int(want.argmax())
    assert torch.equal(logits, before)


def test_logprobs_are_of_the_given_logits() -> None:
    g = torch.Generator().manual_seed(2)
    logits = 4 * torch.randn(3, 517, generator=g)
    ids, values = torch.empty(3, 5, dtype=torch.int32), torch.empty(3, 5)
    params = [
        Params(0.7, seed=i, logprobs=5, tensors={"top_ids": ids[i], "top_logprobs": values[i]})
        for i in range(3)
    ]
    want = logits.double().log_softmax(-1)
    for i, result in enumerate(run(logits, params)):
        top = want[i].topk(5)
        assert torch.equal(ids[i].long(), top.indices)
        torch.testing.assert_close(values[i].double(), top.values, rtol=1e-5, atol=1e-5)
        assert abs(result.logprob - float(want[i, result.token])) < 1e-4
        assert result.rank == 1 + int((logits[i] > logits[i, result.token]).sum())
