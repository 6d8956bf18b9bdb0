"""What changes logits before a token is chosen from them: penalties on what was seen, biases, bans, masks."""

import triton
import triton.language as tl

from .sampling import load_row, number, scaled, word


@triton.jit
def adjust(
    logits, params, meta, prompt_seen, output_counts, adjusted,
    V: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, splits): a copy of the logits with penalties. prompt_seen u8, output_counts i16 (16 bits, no sign):
    [slots, V], read for rows whose flag says so."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    if row < tl.load(meta):
        start = tl.program_id(1) * SPAN
        end = tl.minimum(start + SPAN, V)
        line = logits + row.to(tl.int64) * V
        target = adjusted + row.to(tl.int64) * V
        table = word(params, row, 0).to(tl.int64) * V
        penalised = word(params, row, 14) != 0
        repetition = number(params, row, 5)
        presence = number(params, row, 6)
        frequency = number(params, row, 7)
        for at in range(start, end, BLOCK):
            column = at + tl.arange(0, BLOCK)
            x = load_row(line, column, end)
            if penalised:
                inside = column < end
                count = tl.load(output_counts + table + column, mask=inside, other=0).to(tl.int32) & 0xFFFF
                seen = tl.load(prompt_seen + table + column, mask=inside, other=0).to(tl.int32) | count
                changed = tl.where(x > 0, scaled(x, repetition), x * repetition)
                x = tl.where(seen != 0, changed, x)
                x = tl.where(count != 0, x - (frequency * count.to(tl.float32) + presence), x)
            tl.store(target + column, x, mask=column < end)


@triton.jit
def add_bias(params, meta, tokens, values, adjusted, V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (R): adds a row's entries, [words 12, 13) of ``tokens`` and ``values``; -inf bans."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    if row < tl.load(meta):
        end = word(params, row, 13)
        target = adjusted + row.to(tl.int64) * V
        for at in range(word(params, row, 12), end, BLOCK):
            entry = at + tl.arange(0, BLOCK)
            token = tl.load(tokens + entry, mask=entry < end, other=0)
            value = tl.load(values + entry, mask=entry < end, other=0.0)
            tl.atomic_add(target + token, value, mask=entry < end, sem="relaxed")


@triton.jit
def mask_out(
    meta, masks, adjusted,
    V: tl.constexpr, WORDS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, splits): -inf where the token's bit in masks [R, WORDS] is not set; nothing where meta[2] is 0."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    if (row < tl.load(meta)) & (tl.load(meta + 2) != 0):
        start = tl.program_id(1) * SPAN
        end = tl.minimum(start + SPAN, V)
        target = adjusted + row.to(tl.int64) * V
        for at in range(start, end, BLOCK):
            column = at + tl.arange(0, BLOCK)
            bits = tl.load(masks + row * WORDS + column // 32, mask=column < end, other=-1)
            banned = ((bits >> (column % 32)) & 1) == 0
            tl.store(target + column, float("-inf"), mask=(column < end) & banned)


@triton.jit
def take_target(params, meta, sampled, PDL: tl.constexpr):
    """Grid (R): a row with a target reports on that token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    if row < tl.load(meta):
        token = word(params, row, 15)
        if token >= 0:
            tl.store(sampled + row, token)


@triton.jit
def count_token(params, meta, sampled, output_counts, V: tl.constexpr, PDL: tl.constexpr):
    """Grid (R): one more of the row's token in its slot's output, up to 65535."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    if row < tl.load(meta):
        if word(params, row, 14) != 0:
            place = output_counts + word(params, row, 0).to(tl.int64) * V + tl.load(sampled + row)
            count = tl.load(place).to(tl.int32) & 0xFFFF
            tl.debug_barrier()  # every thread has loaded it
            tl.store(place, tl.minimum(count + 1, 65535).to(tl.int16))
