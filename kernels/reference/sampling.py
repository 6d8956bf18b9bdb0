"""Sampling in numpy: the meaning of ``SampleRows``, which the compiled sampler must agree with token for token.

Logits are f32, steps 1 to 3 too; sums are f64. A row goes through, in this order:

1. penalties: where a token was seen in prompt or output, positive logits are divided by ``repetition_penalty`` and
   negative ones multiplied; then ``frequency_penalty`` times its count in the output is taken off, and
   ``presence_penalty`` if the output has it;
2. bias is added, and tokens outside the row's mask are out of the question;
3. temperature 0: the first largest logit is chosen. Otherwise logits are divided by it;
4. those stay that are at least ``min_p`` as probable as the most probable one; of these, those not below the
   ``top_k``-th largest; of these, those not below the one at which the probability mass of what stayed, from the most
   probable down, reaches ``top_p``. Ties stay together;
5. one uniform number of Philox(seed, draws), times the mass that stayed, is looked up in the running sum by token id
   (no sort is needed when nothing is cut).

Several rows of one slot are sampled one after the other, each seeing what the former drew.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from compilerllm.ir.step import Sampled, SampleRows, SamplingTables
from compilerllm.kernels.reference.philox import uniform

_COUNT_LIMIT = np.iinfo(np.uint16).max

Floats = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]


def sample(logits: Floats, rows: SampleRows, tables: SamplingTables) -> Sampled:
    """Choose a token for each row of logits [R, V]; writes ``last_token``, ``draws`` and ``output_counts``.

    A row whose slot is -1 gets its most likely token and touches no table; one with a target "gets" that.
    """
    number, width = len(rows.slots), rows.num_logprobs
    tokens = np.empty(number, np.int32)
    scored = number if width else 0
    logprob, rank = np.empty(scored, np.float32), np.empty(scored, np.int32)
    top_ids, top_logprobs = np.empty((number, width), np.int32), np.empty((number, width), np.float32)
    for r in range(number):
        raw = np.where(np.isnan(logits[r]), np.float32(-np.inf), logits[r]).astype(np.float32)
        given = -1 if rows.target is None else int(rows.target[r])
        tokens[r] = token = given if given >= 0 else _choose(raw, r, rows, tables)
        if width:
            scores = log_softmax(raw)
            logprob[r], rank[r] = scores[token], 1 + np.count_nonzero(raw > raw[token])
            top_ids[r] = best(raw, width)
            top_logprobs[r] = scores[top_ids[r]]
        _record(int(rows.slots[r]), int(token), tables)
    return Sampled(tokens, logprob, rank, top_ids, top_logprobs)


def _choose(raw: Floats, r: int, rows: SampleRows, tables: SamplingTables) -> int:
    slot = int(rows.slots[r])
    logits = penalised(raw, slot, tables) if rows.penalties and slot >= 0 else raw.copy()
    entries = slice(int(rows.bias_start[r]), int(rows.bias_start[r + 1]))
    np.add.at(logits, rows.bias_token[entries], rows.bias_value[entries])
    if rows.mask is not None:
        bits = np.unpackbits(rows.mask[r].astype("<u4").view(np.uint8), bitorder="little")[: len(logits)]
        logits[bits == 0] = -np.inf
    if slot < 0 or tables.temperature[slot] <= 0:
        return int(logits.argmax())
    weights = cut_weights(
        logits, float(tables.temperature[slot]), int(tables.top_k[slot]), float(tables.top_p[slot]),
        float(tables.min_p[slot]),
    )  # fmt: skip
    return pick(weights, uniform(int(tables.seed[slot]), int(tables.draws[slot])))


def penalised(logits: Floats, slot: int, tables: SamplingTables) -> Floats:
    """Logits after repetition, frequency and presence penalties; a copy."""
    result = logits.copy()
    if tables.output_counts is None:
        return result
    output = tables.output_counts[slot]
    seen = output > 0
    if tables.prompt_counts is not None:
        seen = seen | (tables.prompt_counts[slot] > 0)
    factor = tables.repetition_penalty[slot]
    result[seen] = np.where(result[seen] > 0, result[seen] / factor, result[seen] * factor)
    off = tables.frequency_penalty[slot] * output.astype(np.float32) + tables.presence_penalty[slot]
    return np.where(output > 0, result - off, result)


def best(logits: Floats, count: int) -> npt.NDArray[np.int64]:
    """The ``count`` largest, in the order (logit descending, id ascending)."""
    return np.argsort(-logits, kind="stable")[:count]


@dataclass(frozen=True, eq=False)
class Weights:
    """Unnormalised probabilities [V] (1 for the most likely), and which tokens stay."""

    weight: Wide
    stays: npt.NDArray[np.bool_]


def cut_weights(logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float) -> Weights:
    """Steps 3 and 4 for one row [V]; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 cut nothing."""
    scaled = logits / np.float32(temperature)
    peak = scaled.max()
    if peak == -np.inf:  # everything is banned: the first token, as greedy would choose
        return Weights(np.ones(len(logits)), np.arange(len(logits)) == 0)
    weight = np.exp(scaled - peak).astype(np.float64)
    low = np.float32(-np.inf)
    if min_p > 0:
        low = peak + np.log(np.float32(min_p))
    if 0 < top_k < len(scaled):
        low = max(low, np.partition(scaled, -top_k)[-top_k])
    if top_p < 1:
        order = np.argsort(-scaled, kind="stable")
        order = order[scaled[order] >= low]
        running = np.cumsum(weight[order])
        reached = np.searchsorted(running, float(np.float32(top_p)) * running[-1])
        low = scaled[order[min(reached, len(order) - 1)]]
    return Weights(weight, scaled >= low)


def pick(weights: Weights, number: float) -> int:
    """The token whose share of the running sum, by id, holds ``number`` in [0, 1)."""
    running = np.cumsum(np.where(weights.stays, weights.weight, 0.0))
    found = int(np.searchsorted(running, number * running[-1], side="right"))
    return found if found < len(running) else int(np.flatnonzero(weights.stays)[-1])


def log_softmax(logits: Floats) -> Wide:
    """Natural log-probabilities [V]."""
    wide = logits.astype(np.float64)
    peak = wide.max()
    result: Wide = wide - (peak + np.log(np.exp(wide - peak).sum()))
    return result


def _record(slot: int, token: int, tables: SamplingTables) -> None:
    if slot < 0:
        return
    tables.last_token[slot] = token
    tables.draws[slot] += 1
    if tables.output_counts is not None and tables.output_counts[slot, token] < _COUNT_LIMIT:
        tables.output_counts[slot, token] += 1
