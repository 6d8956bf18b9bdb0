"""Sampling on CUDA against the numpy reference: the sampler with its programs, run in Triton's interpreter or natively."""

import dataclasses
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compilerllm.ir.step import Sampled, SampleRows, SamplingTables
from compilerllm.kernels.launch.gpu.backend import Backend
from compilerllm.kernels.launch.gpu.program import META_BYTES, RESULT_WORD
from compilerllm.kernels.launch.gpu.sampling import FULL, GREEDY, SAMPLED, TOP, GpuSampler, variant_of
from compilerllm.kernels.launch.gpu.steps import last_rows
from compilerllm.kernels.launch.sampling import empty_tables
from compilerllm.kernels.reference.sampling import sample
from compilerllm.kernels.triton import emit_sampling
from compilerllm.kernels.triton.emit_sampling import draft_sampling, finish_sampling, sampling_program
from compilerllm.kernels.triton.interpreted_backend import InterpretedBackend
from tests.kernels.triton.harness import NATIVE, TARGET, cross_compile
from tests.kernels.triton.races import watch

MOST_ROWS = 8


@pytest.fixture(autouse=True)
def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs a row than on a GPU: the interpreter runs them one by one."""
    if not NATIVE:
        monkeypatch.setattr(emit_sampling, "MOST_SPLITS", 4)
        monkeypatch.setattr(emit_sampling, "TOPS", 512)


Change = dict[str, Any]


def make_backend() -> Backend:
    if NATIVE:
        from compilerllm.kernels.launch.gpu.backend import CudaBackend

        return CudaBackend(90)
    return InterpretedBackend()


class Rig:
    """The sampler beside the reference, each with tables of its own."""

    def __init__(self, vocab: int, slots: int = MOST_ROWS, buckets: tuple[int, ...] = (2, MOST_ROWS)) -> None:
        self.vocab, self.backend = vocab, make_backend()
        cache = Path(tempfile.gettempdir()) / "compilerllm-test-kernels"
        if NATIVE:
            program, _ = sampling_program(vocab, buckets, TARGET, 2, cache)
            folder = Path(tempfile.mkdtemp())
            (folder / "kernels").symlink_to(cache / TARGET.arch)
        else:
            program, folder = finish_sampling(*draft_sampling(vocab, buckets, TARGET)), Path()
        memory = self.backend.allocate(4 * MOST_ROWS * vocab, "logits")
        self.logits = memory[: 4 * MOST_ROWS * vocab].view(torch.float32).view(MOST_ROWS, vocab)
        self.slot_memory = self.backend.allocate(4 * MOST_ROWS, "slots")
        self.step = self.backend.allocate(META_BYTES, "step inputs")
        self.sampler = GpuSampler(
            self.backend,
            program,
            self.backend.load(program, folder),
            self.logits,
            slots,
            self.step.data_ptr(),
        )
        self.oracle = empty_tables(slots)

    def fill(self, slot: int, **values: Any) -> None:
        """A request's parameters, in both."""
        for tables in (self.sampler.tables, self.oracle):
            for name, value in ({"seed": slot + 11, "draws": 0} | values).items():
                getattr(tables, name)[slot] = value
        self.sampler.tables.changed.add(slot)

    def count(self, slot: int, prompt: list[int], output: list[int]) -> None:
        """Tokens a penalised request has seen."""
        for tables in (self.sampler.tables, self.oracle):
            if tables.output_counts is None:
                tables.prompt_counts = np.zeros((len(tables.top_k), self.vocab), np.uint16)
                tables.output_counts = np.zeros((len(tables.top_k), self.vocab), np.uint16)
            for table, tokens in ((tables.prompt_counts, prompt), (tables.output_counts, output)):
                table[slot] = np.bincount(tokens, minlength=self.vocab)
        self.sampler.tables.changed.add(slot)

    def expect(self, logits: np.ndarray, rows: SampleRows, joined: int = 0) -> Sampled:
        """Sample both ways, joined to a graph's bucket of that many rows or alone; asserts that they agree."""
        count = len(rows.slots)
        self.backend.synchronize()
        self.logits.fill_(float("nan"))
        self.logits[:count] = torch.from_numpy(logits)
        slots = torch.full((MOST_ROWS,), -1, dtype=torch.int32)
        slots[:count] = torch.from_numpy(last_rows(rows.slots))
        self.slot_memory[: 4 * MOST_ROWS].view(torch.int32).copy_(slots)
        where = self.slot_memory.data_ptr()
        self.step[:META_BYTES].view(torch.int32)[RESULT_WORD] = self.sampler.next_result
        variant = self.sampler.prepare(rows)
        assert variant == ("" if variant_of(rows) == FULL else variant_of(rows))
        if joined:
            self.backend.synchronize()
            work = self.sampler.work(variant, joined, where)
            work() if NATIVE else self.backend.capture(work)()
        else:
            self.sampler.run(rows, where)
        with nullcontext() if NATIVE else watch():
            got = self.sampler.collect(rows)()
            self.backend.synchronize()
        wanted = sample(logits, rows, self.oracle)
        np.testing.assert_array_equal(got.token_ids, wanted.token_ids)
        real = rows.slots[rows.slots >= 0]
        last = self.sampler._last_token[: 4 * len(self.oracle.last_token)].view(torch.int32).cpu().numpy()
        np.testing.assert_array_equal(last[real], self.oracle.last_token[real])
        if rows.num_logprobs:
            np.testing.assert_array_equal(got.rank, wanted.rank)
            np.testing.assert_array_equal(got.top_ids, wanted.top_ids)
            np.testing.assert_allclose(got.logprob, wanted.logprob, atol=3e-5)
            np.testing.assert_allclose(got.top_logprobs, wanted.top_logprobs, atol=3e-5)
        assert not self.sampler._counters.any(), "a kernel left a counter behind"
        return got


def rows_of(
    slots: list[int], tables: SamplingTables, bias: list[dict[int, float]] | None = None, logprobs: int = 0,
    penalties: bool = False,
) -> SampleRows:  # fmt: skip
    bias = bias or [{} for _ in slots]
    return SampleRows(
        np.array(slots, np.int32), np.cumsum([0, *map(len, bias)]).astype(np.int32),
        np.array([t for b in bias for t in b], np.int32), np.array([v for b in bias for v in b.values()], np.float32),
        logprobs, penalties, any(s >= 0 and tables.temperature[s] > 0 for s in slots),
    )  # fmt: skip


def noise(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Any:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * scale).astype(np.float32)


@pytest.mark.parametrize("vocab", [1000, 1003])
@pytest.mark.parametrize("joined", [0, 8])
def test_greedy(vocab: int, joined: int) -> None:
    rig = Rig(vocab)
    logits = noise(6, vocab)
    logits[0, [7, 500, 999]] = 50  # ties
    logits[1, 3] = np.nan
    logits[2] = -np.inf
    logits[3, :] = np.nan
    logits[3, 998] = -70
    logits[4, -1] = 99
    logits[5, :] = -np.abs(logits[5]) - 1
    rig.fill(0, temperature=0)
    rows = rows_of([0, 3, 1, 2, -1, 5], rig.oracle)
    assert variant_of(rows) == GREEDY
    got = rig.expect(logits, rows, joined)
    assert got.token_ids[:5].tolist() == [7, got.token_ids[1], 0, 998, vocab - 1]


CASES: list[Change] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1e-4},
    {"temperature": 100.0, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 0.0},
    {"temperature": 1.0, "top_k": 100000, "top_p": 1.0},
    {"temperature": 0.0},
    {"temperature": 2.0, "top_k": 900, "top_p": 0.99},
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_cuts(case: int) -> None:
    rig = Rig(1000 + 3 * (case % 2))
    for slot in range(4):
        rig.fill(slot, **CASES[case], seed=2**40 + 977 * slot, draws=2**33 * (slot == 1))
    logits = noise(4, rig.vocab, case)
    logits[2, ::3] = logits[2, 0]  # ties at the cuts
    logits[3, 100:] = -np.inf
    logits[3, 5] = np.nan
    rig.expect(logits, rows_of([2, 0, 3, 1], rig.oracle))
    rig.expect(logits[:2], rows_of([0, 2], rig.oracle))


def test_mixed_batch_joined_to_a_graph() -> None:
    rig = Rig(1003)
    for slot, case in enumerate((0, 1, 2, 4, 10)):
        rig.fill(slot, **CASES[case])
    rows = rows_of([4, 2, -1, 0, 1], rig.oracle)
    assert variant_of(rows) == SAMPLED
    for step in range(2):
        rig.expect(noise(5, 1003, step), rows, joined=8)


def test_all_banned_gives_the_first_token() -> None:
    rig = Rig(1000)
    rig.fill(0, temperature=1.0, top_p=0.9)
    rig.fill(1, temperature=1.0)
    got = rig.expect(np.full((2, 1000), -np.inf, np.float32), rows_of([0, 1], rig.oracle))
    assert got.token_ids.tolist() == [0, 0]


def test_cuts_wider_than_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is too short for what may survive: cuts are found in the row."""
    monkeypatch.setattr(emit_sampling, "LIST", 64)
    rig = Rig(1003)
    rig.fill(0, temperature=1.0, top_k=100)
    rig.fill(1, temperature=2.0, top_p=0.95)
    rig.fill(2, temperature=5.0, top_k=400, top_p=0.9, min_p=0.001)
    rig.expect(noise(3, 1003), rows_of([0, 1, 2], rig.oracle))


def test_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rig = Rig(32000)
    rig.fill(0, temperature=0.8, top_k=40, top_p=0.95)
    rig.fill(1, temperature=1.0)
    rig.fill(2, temperature=0.6, top_p=0.9)
    rig.fill(3, temperature=1.0, top_p=0.95)  # flat: thousands stay
    logits = noise(4, 32000, 4)
    logits[3] *= 0.2
    rig.expect(logits, rows_of([0, 1, 2, 3], rig.oracle))


def test_rows_of_one_slot_draw_successive_numbers() -> None:
    rig = Rig(1000)
    rig.fill(0, temperature=1.5)
    rig.fill(1, temperature=1.5, draws=7)
    logits = np.repeat(noise(1, 1000), 6, axis=0)
    got = rig.expect(logits, rows_of([0, 1, 0, 0, 1, 0], rig.oracle))
    assert len(set(got.token_ids[[0, 2, 3, 5]].tolist())) > 1
    rig.expect(logits, rows_of([1, 1, 0, 0, 0, 0], rig.oracle))


def test_one_row_of_a_slot_writes_it() -> None:
    """Programs run in any order, so that the last row's token is what its slot gets."""
    slots = np.array([0, 1, 0, -1, 1, -1], np.int32)
    assert last_rows(slots).tolist() == [-1, -1, 0, -1, 1, -1]
    rig = Rig(1000)
    logits = noise(3, 1000)
    rig.expect(logits, rows_of([2, 2, 1], rig.oracle))
    rig.expect(logits, rows_of([2, 2, 1], rig.oracle), joined=8)


def test_draws_follow_the_distribution() -> None:
    """Many draws of one distribution over few tokens."""
    rig = Rig(1000)
    weights = np.array([0.4, 0.3, 0.2, 0.1])
    logits = np.full((8, 1000), -np.inf, np.float32)
    logits[:, [3, 250, 251, 999]] = np.log(weights)
    for slot in range(8):
        rig.fill(slot, temperature=1.0)
    rows = rows_of(list(range(8)), rig.oracle)
    seen = np.concatenate([rig.expect(logits, rows, joined=8).token_ids for _ in range(8)])
    shares = np.array([(seen == t).mean() for t in (3, 250, 251, 999)])
    assert shares.sum() == pytest.approx(1) and np.abs(shares - weights).max() < 0.2


def test_penalties_biases_and_logprobs() -> None:
    vocab = 1003
    rig = Rig(vocab)
    rig.fill(0, temperature=0.0, repetition_penalty=1.3)
    rig.fill(1, temperature=0.8, presence_penalty=0.5, frequency_penalty=0.7, top_k=20)
    rig.fill(2, temperature=1.0, top_p=0.9)
    rig.count(0, [1, 2, 3, 3], [7, 7])
    rig.count(1, [5], [9, 9, 10])
    logits = noise(4, vocab, 2)
    logits[0, 7] = 30
    logits[0, 8] = 29
    logits[2, 17] = np.nan
    bias = [{4: 2.5, 9: -np.inf}, {}, {int(np.nanargmax(logits[2])): -np.inf}, {0: 1.0}]
    for step in range(2):
        rig.expect(logits, rows_of([0, 1, 2, -1], rig.oracle, bias, 5, True))
        rig.expect(logits[2:] + step, rows_of([2, -1], rig.oracle, None, 20 if step else 1))
    for slot in (0, 1):
        np.testing.assert_array_equal(rig.sampler.tables.output_counts[slot], rig.oracle.output_counts[slot])


def test_penalties_with_rows_of_one_slot() -> None:
    rig = Rig(1003)
    rig.fill(0, temperature=0.0, frequency_penalty=2.0)
    rig.count(0, [], [])
    logits = np.repeat(noise(1, 1003), 4, axis=0)
    got = rig.expect(logits, rows_of([0, 0, 0, 0], rig.oracle, None, 2, True))
    assert len(set(got.token_ids.tolist())) == 4


@pytest.mark.parametrize("vocab", [1000, 1003])
def test_masks_and_targets(vocab: int) -> None:
    """In full launches that begin at any row: a step has more rows than one of them takes."""
    rig = Rig(vocab)
    for slot, case in enumerate((0, 1, 2, 10)):
        rig.fill(slot, **CASES[case])
    generator = np.random.default_rng(4)
    rows = rows_of([3, -1, 0, 1, -1, 2], rig.oracle, logprobs=3)
    may = generator.random((6, vocab)) < np.array([0.01, 1, 0.5, 0, 1, 1])[:, None]
    may[3, vocab - 1] = True
    bits = (
        np.packbits(np.pad(may, ((0, 0), (0, -vocab % 32))), axis=1, bitorder="little")
        .view("<u4")
        .astype(np.uint32)
    )
    target = np.array([-1, 5, -1, -1, vocab - 1, -1], np.int32)
    logits = noise(6, vocab)
    logits[0, 17] = np.nan
    masked = dataclasses.replace(rows, mask=bits, target=target)
    assert variant_of(dataclasses.replace(rows, num_logprobs=0, mask=bits)) == FULL
    got = rig.expect(logits, masked)
    assert got.token_ids[[1, 3, 4]].tolist() == [5, vocab - 1, vocab - 1]
    rig.expect(noise(6, vocab, 1), dataclasses.replace(masked, target=None, num_logprobs=0))
    rig.expect(noise(6, vocab, 2), rows)  # no mask of the step before is left


def test_many_biases() -> None:
    rig = Rig(1000)
    bias = [dict.fromkeys(range(900), -np.inf), dict.fromkeys(range(100, 1000), -np.inf)]
    got = rig.expect(noise(2, 1000), rows_of([0, 1], rig.oracle, bias))
    assert got.token_ids[0] >= 900 > 100 > got.token_ids[1]


def test_nothing_beside_the_results_is_written() -> None:
    rig = Rig(1000)
    rig.fill(0, temperature=1.0, top_p=0.9)
    before = rig.logits
    rows = rows_of([0, 2], rig.oracle, [{5: 3.0}, {}], 3)
    results = rig.sampler._results
    rig.backend.synchronize()
    for name in ("top_ids", "top_logprobs", "logprob", "rank"):
        results[name].fill_(0x55)
    rig.expect(noise(2, 1000), rows)
    ids = results["top_ids"].view(torch.int32)[: MOST_ROWS * TOP].view(MOST_ROWS, TOP).cpu()
    assert bool((ids[2:] == 0x55555555).all()) and bool((ids[:2, 3:] == 0x55555555).all())
    np.testing.assert_array_equal(before[:2].cpu().numpy(), noise(2, 1000))  # raw logits stay
    last = rig.sampler._last_token[: 4 * MOST_ROWS].view(torch.int32).cpu()
    assert bool((last[[1, 3, 4, 5, 6, 7]] == 0).all())


@pytest.mark.parametrize(
    ("capability", "vocab"), [(80, 151937), (89, 151937), (90, 128256), (90, 151937), (100, 151937)]
)
def test_cross_compiles(capability: int, vocab: int) -> None:
    target = dataclasses.replace(TARGET, pdl=capability >= 90)
    draft, _ = draft_sampling(vocab, (64,), target)
    for source in draft.sources():
        given = dict(source.signature) | dict(source.constexprs)
        meta = cross_compile(
            source.template, given, capability=capability, num_warps=source.num_warps, pdl=source.pdl
        )
        assert meta["shared"] <= TARGET.shared
