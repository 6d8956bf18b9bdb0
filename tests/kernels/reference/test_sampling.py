"""Sampling: Philox against published vectors, each cut against a plain definition, chosen frequencies by chi-square."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from compilerllm.ir.step import Sampled, SampleRows, SamplingTables
from compilerllm.kernels.launch.sampling import empty_tables
from compilerllm.kernels.reference.philox import philox4x32, uniform
from compilerllm.kernels.reference.sampling import (
    cut_weights,
    log_softmax,
    penalised,
    pick,
    sample,
)

VOCAB = 40
# 99.99 % quantiles of chi-square by degrees of freedom: a right sampler fails one seed in ten thousand, and ours is fixed.
CHI_SQUARE = {39: 81.0, 9: 33.72, 4: 23.51}


def logits_row(seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 1.5


def rows_of(
    slots: list[int], *, bias: dict[int, dict[int, float]] | None = None, logprobs: int = 0, penalties: bool = False
) -> SampleRows:  # fmt: skip
    entries = [sorted((bias or {}).get(r, {}).items()) for r in range(len(slots))]
    flat = [pair for row in entries for pair in row]
    return SampleRows(
        np.array(slots, np.int32), np.cumsum([0, *map(len, entries)]).astype(np.int32),
        np.array([t for t, _ in flat], np.int32), np.array([v for _, v in flat], np.float32), logprobs, penalties, True,
    )  # fmt: skip


def tables_of(slots: int = 1, /, **values: float) -> SamplingTables:
    tables = empty_tables(slots)
    for name, value in values.items():
        getattr(tables, name)[:] = value
    return tables


def draw(logits: npt.NDArray[np.float32], tables: SamplingTables, **rows: Any) -> Sampled:
    return sample(logits.reshape(1, -1), rows_of([0], **rows), tables)


def softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    return np.exp(log_softmax(logits))


def test_philox_known_answers() -> None:
    # From the known-answer file of the authors' library (Random123), philox4x32 with 10 rounds.
    assert philox4x32(0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 2**64 - 1, 2**128 - 1
    assert philox4x32(*ones) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    counter = 0x0370734413198A2E85A308D3243F6A88
    assert philox4x32(0x299F31D0A4093822, counter) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_uniform_is_uniform_and_depends_on_seed_and_draw_alone() -> None:
    numbers = np.array([[uniform(seed, d) for d in range(1000)] for seed in (0, 1, 2**63 + 5)])
    assert numbers.min() >= 0 and numbers.max() < 1
    for row in numbers:
        counts, _ = np.histogram(row, bins=10, range=(0, 1))
        assert ((counts - 100) ** 2 / 100).sum() < CHI_SQUARE[9]
    assert abs(np.corrcoef(numbers)[0, 1]) < 0.1


def test_greedy_takes_the_first_largest_and_tells_logprobs() -> None:
    logits = logits_row()
    logits[[7, 3]] = 9.0
    logits[5] = np.nan
    result = draw(logits, tables_of(), logprobs=3)
    assert result.token_ids[0] == 3 and result.rank[0] == 1
    assert result.top_ids[0].tolist()[:2] == [3, 7]
    clean = np.where(np.isnan(logits), -np.inf, logits).astype(np.float32)
    np.testing.assert_allclose(result.top_logprobs[0], log_softmax(clean)[result.top_ids[0]], rtol=1e-6)
    np.testing.assert_allclose(result.logprob[0], log_softmax(clean)[3], rtol=1e-6)
    nothing = draw(logits, tables_of())
    assert nothing.logprob.size == nothing.rank.size == 0 and nothing.top_ids.shape == (1, 0)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = logits_row()
    least = int(logits.argmin())
    result = draw(logits, tables_of(temperature=0.3), bias={0: {least: 100.0}}, logprobs=1)
    assert result.token_ids[0] == least and result.rank[0] == VOCAB
    np.testing.assert_allclose(result.logprob[0], log_softmax(logits)[least], rtol=1e-5)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [
    (0, 1.0, 0.0), (1, 1.0, 0.0), (5, 1.0, 0.0), (100, 1.0, 0.0), (0, 0.5, 0.0), (0, 1e-9, 0.0), (0, 1.0, 0.2), (7, 0.8, 0.1),
])  # fmt: skip
def test_cuts_equal_their_plain_definition(top_k: int, top_p: float, min_p: float) -> None:
    logits = logits_row(1)
    logits[[2, 30]] = logits.max()  # a tie: both stay or none
    weights = cut_weights(logits, 0.7, top_k, top_p, min_p)
    probabilities = softmax(logits / np.float32(0.7))
    best = sorted((float(v) for v in logits), reverse=True)
    least = best[min(top_k or VOCAB, VOCAB) - 1]
    order = sorted(range(VOCAB), key=lambda i: -float(logits[i]))
    order = [i for i in order if logits[i] >= least and probabilities[i] >= min_p * probabilities.max()]
    mass = sum(probabilities[i] for i in order)
    kept: set[int] = set()
    before, last = 0.0, float("nan")
    for i in order:
        if not kept or before < top_p * mass or logits[i] == last:
            kept.add(i)
            last = logits[i]
        before += probabilities[i]
    assert set(np.flatnonzero(weights.stays)) == kept


def test_pick_walks_the_running_sum() -> None:
    weights = cut_weights(np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32)), 1.0, 3, 1.0, 0.0)
    edges = [0.0, 0.2 / 0.9 - 1e-6, 0.2 / 0.9 + 1e-6, 0.5 / 0.9 + 1e-6, 1 - 2**-53]
    assert [pick(weights, u) for u in edges] == [1, 1, 2, 3, 3]


@pytest.mark.parametrize(("settings", "degrees"), [
    ({"temperature": 1.0}, 39), ({"temperature": 1.3, "top_k": 10}, 9), ({"temperature": 1.0, "top_k": 5}, 4),
])  # fmt: skip
def test_frequencies_follow_the_distribution(settings: dict[str, float], degrees: int) -> None:
    logits = logits_row(2) * np.float32(0.6)  # flat enough for 5 expected counts in each cell
    tables = tables_of(1, **settings, seed=1234)
    counts = np.zeros(VOCAB)
    draws = 6000
    for _ in range(draws):
        counts[draw(logits, tables).token_ids[0]] += 1
    weights = cut_weights(logits, settings["temperature"], int(settings.get("top_k", 0)), 1.0, 0.0)
    expected = np.where(weights.stays, weights.weight, 0.0)
    expected *= draws / expected.sum()
    cells = expected > 0
    assert counts[~cells].sum() == 0 and cells.sum() == degrees + 1 and expected[cells].min() >= 5
    assert ((counts - expected)[cells] ** 2 / expected[cells]).sum() < CHI_SQUARE[degrees]
    assert tables.draws[0] == draws


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = np.stack([logits_row(s) for s in range(4)])
    together = tables_of(4, temperature=1.0)
    together.seed[:] = [5, 6, 7, 8]
    batched = [sample(logits, rows_of([0, 1, 2, 3]), together).token_ids.tolist() for _ in range(10)]
    for slot in range(4):
        alone = tables_of(4, temperature=1.0)
        alone.seed[:] = [5, 6, 7, 8]
        tokens = [sample(logits[slot : slot + 1], rows_of([slot]), alone).token_ids[0] for _ in range(10)]
        assert tokens == [row[slot] for row in batched]


def test_penalties() -> None:
    tables = tables_of(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    tables.prompt_counts = np.zeros((1, VOCAB), np.uint16)
    tables.output_counts = np.zeros((1, VOCAB), np.uint16)
    tables.prompt_counts[0, 0] = 4  # only repetition counts the prompt
    tables.output_counts[0, [1, 2]] = [3, 1]
    logits = np.zeros(VOCAB, np.float32)
    logits[:4] = [2.0, 2.0, -2.0, 1.0]
    assert penalised(logits, 0, tables)[:5].tolist() == [1.0, 1.0 - 1.5 - 0.25, -4.0 - 0.5 - 0.25, 1.0, 0.0]
    chosen = draw(logits, tables, penalties=True).token_ids[0]
    assert chosen == 0 and tables.output_counts[0, 0] == 1 and tables.last_token[0] == 0
    tables.output_counts[0, 3] = 65535
    draw(logits, tables, bias={0: {3: 50.0}})
    assert tables.output_counts[0, 3] == 65535  # saturates, never wraps


def test_bias_bans_and_score_only_rows_touch_no_table() -> None:
    logits = logits_row()
    best = int(logits.argmax())
    tables = tables_of(temperature=1.0, top_k=1)
    assert draw(logits, tables, bias={0: {best: -np.inf}}).token_ids[0] == np.argsort(-logits)[1]
    before = tables.draws.copy(), tables.last_token.copy()
    result = sample(logits.reshape(1, -1), rows_of([-1], logprobs=2), tables)
    assert result.token_ids[0] == best and (tables.draws, tables.last_token) == before
    everything = dict.fromkeys(range(VOCAB), -np.inf)
    assert draw(logits, tables, bias={0: everything}).token_ids[0] == 0


def test_rows_of_one_slot_draw_one_after_the_other() -> None:
    logits = np.stack([logits_row(0)] * 3)
    tables = tables_of(temperature=1.0, seed=3)
    together = sample(logits, rows_of([0, 0, 0]), tables).token_ids.tolist()
    again = tables_of(temperature=1.0, seed=3)
    assert together == [int(sample(logits[:1], rows_of([0]), again).token_ids[0]) for _ in range(3)]
    assert tables.draws[0] == 3 and tables.last_token[0] == together[-1]
