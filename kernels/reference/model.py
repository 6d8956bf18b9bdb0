"""Level O0: a served module run by the interpreter, behind the interface the runtime asks of a compiled model."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compilerllm.ir.graph import Module
from compilerllm.ir.step import Bucket, Sampled, SampleRows, SamplingTables, StateGroup, StepInputs
from compilerllm.kernels.launch.sampling import empty_tables
from compilerllm.kernels.reference.collective import Collective
from compilerllm.kernels.reference.errors import ReferenceFailure
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.kernels.reference.sampling import sample
from compilerllm.kernels.reference.states import BLOCK_SIZE, State, Step, allocate_states, state_groups


class ReferenceModel:
    """An ``Executable``. ``params`` as for ``Interpreter``; every bucket is served, since nothing is specialised."""

    def __init__(
        self, module: Module, params: Mapping[str, Tensor], *, max_model_len: int, buckets: tuple[Bucket, ...],
        block_size: int = BLOCK_SIZE, collective: Collective | None = None,
    ) -> None:  # fmt: skip
        self.module = module
        self.max_model_len = max_model_len
        self.buckets = buckets
        self.block_size = block_size
        self.groups: tuple[StateGroup, ...] = state_groups(module, block_size)
        width = module.main.outputs[0].shape[-1]
        if not isinstance(width, int):
            raise ReferenceFailure(f"@main must give logits [R, V] with a fixed V, but V is {width}")
        self.vocab_size = width
        self.leaves_host_free = False  # torch's operators take all cores
        self._interpreter = Interpreter(module, params, collective=collective)
        self._states: dict[str, State] | None = None
        self._tables: SamplingTables | None = None
        self._logits: npt.NDArray[np.float32] = np.empty((0, width), np.float32)

    def allocate(self, num_blocks: int, max_num_seqs: int) -> SamplingTables:
        """Make states and sampling tables; again: fresh ones."""
        self._states = allocate_states(self.module, num_blocks, max_num_seqs, self.block_size)
        self._tables = empty_tables(max_num_seqs)
        return self._tables

    @property
    def states(self) -> Mapping[str, State]:
        """The states by global name. Raises ``ReferenceFailure`` before ``allocate``."""
        if self._states is None:
            raise ReferenceFailure("the model has no states yet; call allocate first")
        return self._states

    @property
    def tables(self) -> SamplingTables:
        """The sampling tables. Raises ``ReferenceFailure`` before ``allocate``."""
        if self._tables is None:
            raise ReferenceFailure("the model has no sampling tables yet; call allocate first")
        return self._tables

    def forward(self, step: StepInputs) -> None:
        """Run one step; the logits of its ``sample_rows`` are kept for ``sample`` and ``logits``."""
        ready = Step(step, torch.from_numpy(self.tables.last_token))
        result = self._interpreter.run_step(ready, self.states)
        self._logits = result.float().numpy()

    def sample(self, rows: SampleRows) -> Sampled:
        """Choose tokens from the last forward's logits; see ``sampling``."""
        return sample(self._logits, rows, self.tables)

    def logits(self) -> npt.NDArray[np.float32]:
        """The last forward's logits [R, V]."""
        return self._logits
