"""Log-probabilities of the chosen and of the most likely tokens, of logits as the model gave them."""

import triton
import triton.language as tl

from .sampling import NOTHING, code_of, column_of, load_row, value_of


@triton.jit
def score(
    logits, meta, sampled, best, peaks, sums, larger,
    V: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr, SPAN2: tl.constexpr, TOP2: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, SPLITS), of raw logits, where meta[1] asks for log-probabilities. A part's largest, its sum of
    exp(x - largest), how many are larger than the chosen token's, and its meta[1] most likely in best [R, SPLITS, TOP2]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    split = tl.program_id(1)
    top = tl.load(meta + 1)
    if (row < tl.load(meta)) & (top > 0):
        line = logits + row.to(tl.int64) * V
        place = row * SPLITS + split
        lane = tl.arange(0, SPAN2)
        column = split * SPAN + lane
        inside = (lane < SPAN) & (column < V)
        x = load_row(line, tl.where(inside, column, V), V)
        peak = tl.max(x, 0)
        chosen = tl.load(line + tl.load(sampled + row))
        chosen = tl.where(chosen == chosen, chosen, float("-inf"))
        tl.store(peaks + place, peak)
        tl.store(sums + place, tl.sum(tl.where(x > float("-inf"), tl.exp(x - peak), 0.0), 0))
        tl.store(larger + place, tl.sum((x > chosen).to(tl.int32), 0))
        code = tl.where(inside, code_of(x, column), NOTHING)
        order = tl.arange(0, TOP2)
        found = tl.full((TOP2,), NOTHING, tl.int64)
        for i in range(top):
            largest = tl.max(code, 0)
            found = tl.where(order == i, largest, found)
            code = tl.where(code == largest, NOTHING, code)
        tl.store(best + place * TOP2 + order, found)


@triton.jit
def report(
    logits, meta, sampled, best, peaks, sums, larger, logprob, rank, top_ids, top_logprobs,
    V: tl.constexpr, SPLITS: tl.constexpr, TOP2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R): the parts of ``score`` put together. top_ids, top_logprobs [R, TOP2]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    top = tl.load(meta + 1)
    if (row < tl.load(meta)) & (top > 0):
        part = row * SPLITS + tl.arange(0, SPLITS)
        highs = tl.load(peaks + part)
        peak = tl.max(highs, 0)
        shares = tl.where(highs > float("-inf"), tl.load(sums + part) * tl.exp(highs - peak), 0.0)
        log_sum = peak + tl.log(tl.sum(shares, 0))
        chosen = tl.load(logits + row.to(tl.int64) * V + tl.load(sampled + row))
        chosen = tl.where(chosen == chosen, chosen, float("-inf"))
        tl.store(logprob + row, chosen - log_sum)
        tl.store(rank + row, 1 + tl.sum(tl.load(larger + part), 0))
        code = tl.load(best + row * SPLITS * TOP2 + tl.arange(0, SPLITS * TOP2))
        order = tl.arange(0, TOP2)
        found = tl.full((TOP2,), NOTHING, tl.int64)
        for i in range(top):
            largest = tl.max(code, 0)
            found = tl.where(order == i, largest, found)
            code = tl.where(code == largest, NOTHING, code)
        shown = order < top
        tl.store(top_ids + row * TOP2 + order, column_of(found), mask=shown)
        tl.store(top_logprobs + row * TOP2 + order, value_of(found >> 32) - log_sum, mask=shown)
