"""Runs the CUDA program of a module on CPU memory, in Triton's interpreter: poisoned results, poison around every operand."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compilerllm.ir.dims import substitute
from compilerllm.ir.graph import Module
from compilerllm.ir.step import Bucket, StepInputs
from compilerllm.ir.types import StateType, StepType
from compilerllm.kernels.cutlass.supply import NONE, Supply
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.launch.gpu.program import META, Addresses, Plan, Program, StepLayout, arguments
from compilerllm.kernels.triton.emit import Prepare, ProgramDraft, draft_program, finish_program
from compilerllm.kernels.triton.emitter import Chooser
from compilerllm.kernels.triton.interpret import run_kernel
from compilerllm.kernels.triton.target import CudaTarget, find_cuda_target
from compilerllm.passes.inline_calls import inline_calls
from compilerllm.validation.bounds import loads_within

BLOCK = 32  # tokens of a block of the paged cache
PAD = 64  # elements of guard before and behind a result
SURROUND = 4096  # elements of poison before and behind an operand
GUARD = 77  # what guards hold, in any dtype


class Guarded:
    """A result of ``shape``, poisoned (NaN, or -77 in whole numbers), with guards before and behind it."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.count = int(np.prod(shape))
        self._all = torch.full((self.count + 2 * PAD,), GUARD, dtype=dtype)
        self.tensor = self._all[PAD : PAD + self.count].view(tuple(shape))
        self.tensor.fill_(float("nan") if dtype.is_floating_point else -GUARD)

    def broken(self) -> str:
        """Which guard was written: "before", "behind", or "" for neither."""
        guard = torch.full((1,), GUARD, dtype=self._all.dtype)
        if not bool((self._all[:PAD] == guard).all()):
            return "before"
        return "" if bool((self._all[PAD + self.count :] == guard).all()) else "behind"


def surrounded(tensor: Tensor, whole: int = GUARD) -> Tensor:
    """A copy with NaN around it (``whole`` around whole numbers), so that what is read beyond it shows."""
    poison = float("nan") if tensor.dtype.is_floating_point else (1 if tensor.dtype == torch.bool else whole)
    memory = torch.full((tensor.numel() + 2 * SURROUND,), poison, dtype=tensor.dtype)
    inner = memory[SURROUND : SURROUND + tensor.numel()].view(tensor.shape)
    inner.copy_(tensor)
    return inner


class InterpretedMachine:
    """Memory for one program: parameters by global name, states, tables, a step's inputs, an arena.

    States have ``num_blocks`` blocks filled with ``poison``; the arena and the results are NaN. ``prepare`` rewrites the
    module for each bucket, as ``draft_program`` does it.
    """

    def __init__(
        self, module: Module, params: Mapping[str, Tensor], buckets: Sequence[Bucket], *, num_blocks: int = 16,
        table_columns: int = 8, level: int = 2, chooser: Chooser | None = None, prepare: Prepare | None = None,
        slots: int = 8, poison: float = float("nan"), cutlass: Supply = NONE, target: CudaTarget | None = None,
    ) -> None:  # fmt: skip
        self.module = inline_calls(module)
        extra: dict[str, Any] = {} if prepare is None else {"prepare": prepare}
        target = target or find_cuda_target("sm_90")
        draft = draft_program(self.module, buckets, target, level, chooser, cutlass=cutlass, **extra)
        self.sources = draft.sources()
        self.program = self.finish(draft)
        self.params = {n: surrounded(p.contiguous()) for n, p in params.items()}
        self.states = {v.name: _make_state(v.state, num_blocks, poison) for v in self.module.main.states}
        self.groups = max(1, len({v.state.get("window") for v in self.module.main.states}))
        self.table_columns = table_columns
        arena = max([p.arena_bytes for p in self.program.plans] + [256])
        self.arena = torch.full((arena,), 0xFF, dtype=torch.uint8)
        self.counters = torch.zeros(max(1, self.program.counters), dtype=torch.int32)
        self.last_token = torch.zeros(slots, dtype=torch.int32)
        self.outputs: list[Guarded] = []

    def finish(self, draft: ProgramDraft) -> Program:
        """The program of the draft. A machine with a device compiles it here."""
        return finish_program(draft)

    def launch(self, plan: Plan, addresses_of: Callable[[Callable[[Tensor], int]], Addresses]) -> None:
        """Run a plan over tensors; ``addresses_of`` asks for each one's address. A machine with a device overrides this."""
        used: list[Tensor] = []

        def place(tensor: Tensor) -> int:
            used.append(tensor)
            return tensor.data_ptr()

        addresses = addresses_of(place)
        dims = {"T": plan.bucket.tokens, "S": plan.bucket.sequences, "R": plan.bucket.rows}
        with loads_within(used):
            for item in plan.launches:
                values, grid = arguments(item, addresses, dims)
                run_kernel(self.program.kernels[item.kernel], grid, values)

    def run(
        self, plan: int, step: StepInputs | None, inputs: Sequence[Tensor] = (), surround: bool = True
    ) -> list[Tensor]:
        """Main's results (cut to the step's rows for a language model); ``outputs`` has them whole, with their guards."""
        entry = self.program.plans[plan]
        bucket = entry.bucket
        layout = StepLayout.of(bucket, self.groups, self.table_columns)
        packed = np.zeros(layout.bytes // 4, np.int32)
        if step is not None:
            _fill(packed, layout, bucket, step)
        block = torch.from_numpy(packed)
        given = [surrounded(t.contiguous()) if surround else t.contiguous() for t in inputs]
        dims: dict[str, Any] = {"T": bucket.tokens, "S": bucket.sequences, "R": bucket.rows}
        self.outputs = [
            Guarded([int(substitute(d, dims)) for d in v.shape], TORCH_DTYPES[v.dtype])
            for v in self.module.main.outputs
        ]

        places = [i for i, v in enumerate(self.module.main.inputs) if not isinstance(v.type, StepType)]

        def addresses(place: Callable[[Tensor], int]) -> Addresses:
            tables = {"last_token": place(self.last_token)}
            return _Results(
                Addresses(
                    params={n: place(p) for n, p in self.params.items()},
                    states={n: place(s) for n, s in self.states.items()},
                    tables=tables | {f"input_{i}": place(t) for i, t in zip(places, given, strict=True)},
                    arena=place(self.arena), counters=place(self.counters), step_base=place(block), step=layout.offsets,
                ),
                [place(o.tensor) for o in self.outputs],
            )  # fmt: skip

        self.launch(entry, addresses)
        rows = len(step.sample_rows) if step is not None else None
        return [o.tensor[:rows] if rows is not None else o.tensor for o in self.outputs]


class _Results(Addresses):
    """Addresses whose results differ by index."""

    def __init__(self, base: Addresses, outs: list[int]) -> None:
        super().__init__(**vars(base))
        self.outs = outs

    def of(self, pointer: Any) -> int:
        if pointer.space == "logits":
            return self.outs[int(pointer.name or 0)] + int(pointer.offset)
        return super().of(pointer)


def _make_state(state: StateType, num_blocks: int, poison: float) -> Tensor:
    shape = (num_blocks, 2, state["heads"], BLOCK, state["dim"])
    return torch.full(shape, poison, dtype=TORCH_DTYPES[state.dtype])


def _fill(packed: Any, layout: StepLayout, bucket: Bucket, step: StepInputs) -> None:
    """The step in the packed layout, padded as the contract says."""

    def put(name: str, array: Any, size: int, pad: int) -> None:
        at = layout.offsets[name] // 4
        packed[at : at + size] = pad
        packed[at : at + len(array)] = array

    t, s, r = bucket.tokens, bucket.sequences, bucket.rows
    stride = step.block_tables.shape[2] if step.block_tables.ndim == 3 else 0
    packed[: len(META)] = [len(step.token_ids), len(step.seq_lens), len(step.sample_rows), stride]
    put("token_ids", step.token_ids, t, 0)
    put("positions", step.positions, t, 0)
    put("query_start", step.query_start, s + 1, int(step.query_start[-1]))
    put("seq_lens", step.seq_lens, s, 0)
    put("slots", step.slots, s, -1)
    put("sample_rows", step.sample_rows, r, 0)
    put("adapter_id", step.adapter_id, t, 0)
    for g in range(step.block_tables.shape[0]):
        put(f"table_{g}", step.block_tables[g].reshape(-1), s * stride, -1)
