"""References of what serving adds: step metadata, paged attention over states, slot convolutions, adapters."""

import torch
from torch import Tensor
from torch.nn import functional as F

from compilerllm.kernels.reference.errors import FreedBlock, NoCollective
from compilerllm.kernels.reference.model_ops import attention, linear, masked_attention
from compilerllm.kernels.reference.registry import reference
from compilerllm.kernels.reference.states import State, Step


@reference("step_field")
def step_field(step: Step, *, field: str, extent: int | None = None) -> Tensor:
    return step[field]  # the interpreter checks the extent against the result's type


@reference("kv_write")
def kv_write(state: State, k: Tensor, v: Tensor, step: Step) -> None:
    """Token t goes to row position % block_size of its sequence's block position // block_size."""
    size = state.block_size
    for s, a, b in step.sequences():
        positions = step["positions"][a:b].long()
        blocks = step.block_tables[state.group, s][positions // size].long()
        if bool((blocks < 0).any()):
            raise FreedBlock(f"sequence {s} writes to a block that its table of group {state.group} has not")
        state.data[blocks, positions % size, 0] = k[a:b].to(state.data.dtype)
        state.data[blocks, positions % size, 1] = v[a:b].to(state.data.dtype)


@reference("paged_attention")
def paged_attention(
    q: Tensor,
    state: State,
    step: Step,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    result = torch.zeros_like(q)
    size = state.block_size
    for s, a, b in step.sequences():
        context = int(step["seq_lens"][s])
        table = step.block_tables[state.group, s, : -(-context // size)].long()
        keys = torch.arange(context)
        positions = step["positions"][a:b].long().unsqueeze(1)
        visible = keys <= positions
        if window:
            visible = visible & (keys > positions - window)
        freed = (table < 0).repeat_interleave(size)[:context]
        if bool((visible & freed).any()):
            raise FreedBlock(
                f"a token of sequence {s} sees a key whose block was freed (group {state.group})"
            )
        stored = state.data[table.clamp(min=0)].flatten(0, 1)[:context]
        # Rows nobody may see can hold anything, NaN included; a weight of 0 would not silence a NaN.
        stored = stored.masked_fill(~visible.any(0).view(-1, 1, 1, 1), 0.0)
        result[a:b] = masked_attention(q[a:b], stored[:, 0], stored[:, 1], visible, scale, softcap, sinks)
    return result


@reference("varlen_attention")
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Step,
    sinks: Tensor | None = None,
    *,
    scale: float,
    causal: bool,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Rows that belong to no sequence are 0."""
    result = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    for _, a, b in step.sequences():
        result[a:b] = attention(
            q[a:b], k[a:b], v[a:b], sinks, scale=scale, causal=causal, window=window, softcap=softcap
        )
    return result


@reference("slot_conv")
def slot_conv(x: Tensor, state: State, weight: Tensor, step: Step) -> Tensor:
    """out[t, c] = sum over j of weight[c, j] * input[t - width + j, c]; a sequence starts from zeros at position 0."""
    result = torch.empty_like(x)
    width = state.data.shape[2]
    for s, a, b in step.sequences():
        slot = int(step["slots"][s])
        before = state.data[slot]  # [channels, width], oldest first
        if int(step["positions"][a]) == 0:
            before = torch.zeros_like(before)
        whole = torch.cat((before.to(x.dtype), x[a:b].T), 1)  # [channels, width + tokens]
        wide = F.conv1d(whole.float().unsqueeze(0), weight.float().unsqueeze(1), groups=x.shape[1])
        result[a:b] = wide[0].T.to(x.dtype)
        state.data[slot] = whole[:, -width:].to(state.data.dtype)
    return result


@reference("adapter_add")
def adapter_add(x: Tensor, y: Tensor, a: Tensor, b: Tensor, adapter_id: Tensor) -> Tensor:
    """x [T, K], y [T, N], a [slots, rank, K], b [slots, N, rank]."""
    result = y.clone()
    for slot in sorted(set(adapter_id.tolist())):
        if slot:
            rows = adapter_id == slot
            result[rows] = y[rows] + linear(linear(x[rows], a[slot]), b[slot])
    return result


@reference("all_reduce")
def all_reduce(x: Tensor, *, axis: str) -> Tensor:
    """Only the interpreter of several ranks can add them up; it takes this op over (``collective.py``)."""
    raise NoCollective(f"all_reduce over {axis!r} needs the other ranks: give the interpreter a collective")
