"""Where states live in the reference: plain tensors, and how a module's states fall into groups of one addressing."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from compilerllm.ir.graph import Module
from compilerllm.ir.step import StateGroup, StepInputs
from compilerllm.ir.types import StateType
from compilerllm.kernels.groups import group_name, paged_windows
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES

BLOCK_SIZE = 32  # tokens a block, as in the compiled kernels


def state_groups(module: Module, block_size: int = BLOCK_SIZE) -> tuple[StateGroup, ...]:
    """The groups whose block tables a step carries: the windowless one first, then by window, as compiled programs do.

    Paged states with the same window share one table; slot states are one group, after the paged ones. The numbers of
    paged groups are the first index of ``StepInputs.block_tables``.
    """
    paged = dict.fromkeys(paged_windows(module), 0)
    slots = 0
    for _, state in module.state_instances():
        if state.addressing == "paged":
            paged[state.get("window")] += state.bytes_per_unit * block_size
        else:
            slots += state.bytes_per_unit
    groups = [StateGroup(group_name(w), "paged", block_size, size, w) for w, size in paged.items()]
    if slots:
        groups.append(StateGroup("slots", "slot", 0, slots, rollback="none"))
    return tuple(groups)


@dataclass(frozen=True, eq=False)
class State:
    """One state's storage. paged_kv: [blocks, block_size, 2, heads, dim]; slot states: [slots, ...fields]."""

    type: StateType
    data: Tensor
    group: int  # first index of block_tables; of no meaning for slot states

    @property
    def block_size(self) -> int:
        return self.data.shape[1]


def state_shape(state: StateType, num_blocks: int, num_slots: int, block_size: int) -> tuple[int, ...]:
    """Shape of a state's tensor."""
    match state.kind:
        case "paged_kv":
            return (num_blocks, block_size, 2, state["heads"], state["dim"])
        case "slot_conv":
            return (num_slots, state["channels"], state["width"])
        case _:
            return (num_slots, state["heads"], state["rows"], state["columns"])


def allocate_states(
    module: Module, num_blocks: int, num_slots: int, block_size: int = BLOCK_SIZE
) -> dict[str, State]:
    """Every state of the module, by global name. Fresh memory is NaN, so that a read before a write shows."""
    windows = paged_windows(module)
    states = {}
    for name, type in module.state_instances():
        shape = state_shape(type, num_blocks, num_slots, block_size)
        paged = type.addressing == "paged"
        data = torch.full(shape, float("nan") if paged else 0.0, dtype=TORCH_DTYPES[type.dtype])
        states[name] = State(type, data, windows.index(type.get("window")) if paged else 0)
    return states


class Step:
    """``StepInputs`` as torch tensors; negative token ids stand for the last token of a slot."""

    def __init__(self, inputs: StepInputs, last_token: Tensor | None = None) -> None:
        self.inputs = inputs
        self.fields: Mapping[str, Tensor] = {
            name: torch.from_numpy(getattr(inputs, name).copy())
            for name in ("positions", "query_start", "seq_lens", "slots", "sample_rows", "adapter_id")
        }
        self.block_tables = torch.from_numpy(inputs.block_tables.copy())
        ids = torch.from_numpy(inputs.token_ids.copy())
        if bool((ids < 0).any()):
            if last_token is None:
                raise ValueError("a negative token id needs the table of last tokens")
            ids = torch.where(ids < 0, last_token[(-1 - ids).clamp(min=0)], ids)
        given = inputs.token_types
        types = torch.zeros_like(ids) if given is None else torch.from_numpy(given.copy())
        self.fields = {**self.fields, "token_ids": ids, "token_types": types}
        self.dims = {
            "T": len(inputs.token_ids),
            "S": len(inputs.seq_lens),
            "R": len(inputs.sample_rows),
        }

    def __getitem__(self, field: str) -> Tensor:
        return self.fields[field]

    def sequences(self) -> list[tuple[int, int, int]]:
        """(sequence, first token, one past the last token) of those that have tokens in this step."""
        start = self["query_start"].tolist()
        return [(s, a, b) for s, (a, b) in enumerate(pairwise(start)) if b > a]
