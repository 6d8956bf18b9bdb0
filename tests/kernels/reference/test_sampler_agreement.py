"""The compiled sampler chooses the tokens of the reference: same logits, parameters and Philox numbers."""

import copy

import numpy as np
import pytest

from compilerllm.ir.step import SampleRows, SamplingTables
from compilerllm.ir.text import parse_module
from compilerllm.kernels.cpu.build import build_library
from compilerllm.kernels.cpu.emit import emit_program
from compilerllm.kernels.cpu.target import find_target
from compilerllm.kernels.launch.library import Library
from compilerllm.kernels.launch.sampling import Sampler
from compilerllm.kernels.reference.sampling import sample

VOCAB, SLOTS, STEPS = 1000, 24, 6
_ANY = "func @main(%x: f32[16]) {\n  %y = exp(%x) : f32[16]\n  return %y\n}\n"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    target = find_target("cpu")
    program = emit_program(parse_module(_ANY), target)
    return Library(build_library(program.source, target, tmp_path_factory.mktemp("library")))


def fill(tables: SamplingTables, rng: np.random.Generator) -> None:
    """Every slot its own mix of settings; a third are greedy, a third have nothing cut."""
    kinds = np.arange(SLOTS) % 3
    tables.temperature[:] = np.where(kinds == 0, 0, rng.uniform(0.3, 1.5, SLOTS))
    tables.top_k[:] = np.where(kinds == 2, rng.choice([0, 1, 5, 50, 5000], SLOTS), 0)
    tables.top_p[:] = np.where(kinds == 2, rng.choice([1.0, 0.3, 0.9, 0.999], SLOTS), 1)
    tables.min_p[:] = np.where(kinds == 2, rng.choice([0.0, 0.05, 0.5], SLOTS), 0)
    tables.repetition_penalty[:] = rng.choice([1.0, 1.3], SLOTS)
    tables.presence_penalty[:] = rng.choice([0.0, 0.7, -0.4], SLOTS)
    tables.frequency_penalty[:] = rng.choice([0.0, 0.2], SLOTS)
    tables.seed[:] = rng.integers(0, 2**63, SLOTS)
    tables.draws[:] = rng.integers(0, 2**40, SLOTS)


@pytest.mark.parametrize("penalties", [False, True])
def test_same_tokens_and_scores(library: Library, penalties: bool) -> None:
    rng = np.random.default_rng(int(penalties))
    sampler = Sampler(library, VOCAB, SLOTS, threads=2)
    fill(sampler.tables, rng)
    if penalties:
        sampler.tables.prompt_counts = rng.integers(0, 2, (SLOTS, VOCAB)).astype(np.uint16)
        sampler.tables.output_counts = np.zeros((SLOTS, VOCAB), np.uint16)
    expected = copy.deepcopy(sampler.tables)
    for step in range(STEPS):
        logits = (rng.normal(size=(SLOTS, VOCAB)) * rng.uniform(1, 6, (SLOTS, 1))).astype(np.float32)
        logits[0, [3, 7]] = logits[0].max()  # ties
        count = rng.integers(0, 4, SLOTS)
        rows = SampleRows(
            rng.permutation(SLOTS).astype(np.int32), np.concatenate([[0], np.cumsum(count)]).astype(np.int32),
            rng.integers(0, VOCAB, count.sum()).astype(np.int32), rng.choice([-np.inf, 4.0], count.sum()).astype(np.float32),
            4 if step % 2 else 0, penalties, True,
        )  # fmt: skip
        got, want = sampler.sample(logits, rows), sample(logits, rows, expected)
        np.testing.assert_array_equal(got.token_ids, want.token_ids)
        np.testing.assert_array_equal(got.rank, want.rank)
        np.testing.assert_allclose(got.logprob, want.logprob, rtol=1e-5, atol=1e-5)
        if step % 2:
            np.testing.assert_array_equal(got.top_ids, want.top_ids)
            np.testing.assert_allclose(got.top_logprobs, want.top_logprobs, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(sampler.tables.last_token, expected.last_token)
        np.testing.assert_array_equal(sampler.tables.draws, expected.draws)
        if penalties:
            np.testing.assert_array_equal(sampler.tables.output_counts, expected.output_counts)


def test_rows_of_one_slot_and_rows_without_one(library: Library) -> None:
    rng = np.random.default_rng(5)
    sampler = Sampler(library, VOCAB, SLOTS, threads=1)
    sampler.tables.temperature[:] = 1.0
    expected = copy.deepcopy(sampler.tables)
    logits = rng.normal(size=(5, VOCAB)).astype(np.float32) * 3
    slots = np.array([2, -1, 2, 2, 7], np.int32)
    nothing = np.zeros(6, np.int32), np.empty(0, np.int32), np.empty(0, np.float32)
    rows = SampleRows(slots, *nothing, 2, False, True)
    got, want = sampler.sample(logits, rows), sample(logits, rows, expected)
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    np.testing.assert_array_equal(got.top_ids, want.top_ids)
    np.testing.assert_array_equal(sampler.tables.draws, expected.draws)
    np.testing.assert_array_equal(sampler.tables.last_token, expected.last_token)


def test_masks_and_targets(library: Library) -> None:
    """A mask leaves single tokens, few, none or all; a target is reported on, and its slot's row goes on all the same."""
    rng = np.random.default_rng(8)
    sampler = Sampler(library, VOCAB, SLOTS, threads=2)
    fill(sampler.tables, rng)
    expected = copy.deepcopy(sampler.tables)
    allowed = rng.random((SLOTS, VOCAB)) < rng.choice([0.0, 0.002, 0.3, 1.0], SLOTS)[:, None]
    allowed[np.arange(SLOTS) % 4 == 1] = False
    allowed[np.arange(SLOTS) % 4 == 1, 999] = True  # the last, in a word that is not full
    padded = np.pad(allowed, ((0, 0), (0, -VOCAB % 32)))
    mask = np.packbits(padded, axis=1, bitorder="little").view("<u4").astype(np.uint32)
    target = np.where(np.arange(SLOTS) % 5 == 0, rng.integers(0, VOCAB, SLOTS), -1).astype(np.int32)
    slots = np.where(target >= 0, -1, np.arange(SLOTS)).astype(np.int32)
    nothing = np.zeros(SLOTS + 1, np.int32), np.empty(0, np.int32), np.empty(0, np.float32)
    rows = SampleRows(slots, *nothing, 3, False, True, mask, target)
    logits = (rng.normal(size=(SLOTS, VOCAB)) * 4).astype(np.float32)
    got, want = sampler.sample(logits, rows), sample(logits, rows, expected)
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    np.testing.assert_array_equal(got.rank, want.rank)
    np.testing.assert_allclose(got.logprob, want.logprob, rtol=1e-5, atol=1e-5)
    chosen = target < 0
    some = allowed.any(axis=1)
    assert (
        allowed[chosen & some, got.token_ids[chosen & some]].all()
        and (got.token_ids[~chosen] == target[~chosen]).all()
    )
