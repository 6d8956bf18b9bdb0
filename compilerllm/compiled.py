"""A compiled model, loaded: programs per bucket, weights in the kernels' layouts, states, sampling.

No compiler is imported here: an artifact's library and manifest, and the checkpoint's weights, are all it takes.
"""

import ctypes as C
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compilerllm.artifact import ArtifactInvalid, read_manifest
from compilerllm.environment import num_threads
from compilerllm.errors import CompilerLLMError
from compilerllm.ir.step import Bucket, Float32, Sampled, SampleRows, SamplingTables, StateGroup, StepInputs
from compilerllm.kernels.errors import ArtifactError
from compilerllm.kernels.launch.cpu_memory import arena_bytes, plan_process, table_bytes
from compilerllm.kernels.launch.host_memory import available_memory, pages, resident
from compilerllm.kernels.launch.library import Library, kv_block_bytes
from compilerllm.kernels.launch.machine import host_features
from compilerllm.kernels.launch.memory import Region
from compilerllm.kernels.launch.memory_plan import Ledger, MemoryPlan
from compilerllm.kernels.launch.packing import ParameterSpec, load_parameters
from compilerllm.kernels.launch.program import CpuProgram
from compilerllm.kernels.launch.sampling import Sampler
from compilerllm.kernels.launch.weights import WeightSource, execute

BLOCK_SIZE = 32  # tokens; the CPU kernels' cache layout


class StepTooLarge(CompilerLLMError):
    """A step that no bucket of the artifact holds."""


def check_machine(manifest: dict[str, Any]) -> None:
    """Raise ``ArtifactInvalid`` where this processor lacks instructions the artifact was built with."""
    missing = sorted(set(manifest["features"]) - host_features())
    if missing:
        raise ArtifactInvalid(
            f"the artifact is built for {manifest['target']}, but this processor has no {', '.join(missing)}. "
            "Build one for this machine."
        )


class CompiledModel:
    """An ``Executable`` made from an artifact. ``load`` is the way to get one."""

    def __init__(self, folder: Path, manifest: dict[str, Any], threads: int) -> None:
        self.folder, self.manifest, self.threads = folder, manifest, threads
        self.facts: dict[str, Any] = manifest["facts"]
        self.vocab_size = int(manifest["vocab_size"])
        self.max_model_len = int(manifest["max_model_len"])
        self.library = Library(folder / manifest["library"])
        self.program = CpuProgram(self.library, manifest["program"], threads, folder)
        self.buckets = tuple(Bucket(**b) for b in manifest["buckets"])
        self._order = sorted(
            range(len(self.buckets)), key=lambda i: (self.buckets[i].tokens, self.buckets[i].rows)
        )
        self.groups = tuple(self._group(g) for g in manifest["groups"])
        self.weights: Region | None = None
        self._addresses: Mapping[str, int] = {}
        self._states: dict[str, Region] = {}
        self.num_blocks = 0  # KV blocks of each group, from ``allocate`` on
        self._most_rows = max(b.rows for b in self.buckets)
        self._logits = np.empty((self._most_rows, self.vocab_size), np.float32)
        self._rows = 0
        self.base_bytes = resident()  # what the process took before the weights
        self.ledger = Ledger()
        self._specs = [
            ParameterSpec.parse(p["name"], p["dtype"], p["shape"], p["recipe"])
            for p in manifest["parameters"]
        ]

    @staticmethod
    def load(
        folder: Path,
        source: WeightSource,
        *,
        threads: int | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        memory: int | None = None,
        buckets: Collection[Bucket] | None = None,
    ) -> "CompiledModel":
        """Open the artifact in ``folder`` and fill its parameters from ``source``.

        ``buckets``: those of the artifact's that will be needed; by default all. ``memory``: bytes that the process may take; the plan is held against them and against what is available before
        anything is allocated. Raises ``DoesNotFit``, ``ArtifactInvalid``, ``ArtifactError`` and the weight source's
        errors; ``on_progress`` gets bytes done and bytes in all.
        """
        manifest = read_manifest(folder)
        if manifest is None:
            raise ArtifactInvalid(
                f"{folder} holds no finished artifact. Build it with `compilerllm compile`."
            )
        check_machine(manifest)
        if buckets is not None:
            manifest = _within(manifest, buckets)
        model = CompiledModel(folder, manifest, threads or num_threads())
        model._hold_to_plan(memory)
        model.weights, model._addresses = load_parameters(
            model._specs, lambda recipe: execute(recipe, source), model.library, on_progress
        )
        model.ledger.charge("weights", pages(model.weights.size))
        return model

    def memory_plan(self, max_num_seqs: int | None = None) -> MemoryPlan:
        """Predicted bytes of this process, of everything but KV blocks, from the artifact alone."""
        slots = max_num_seqs or max(b.sequences for b in self.buckets)
        arena = arena_bytes(self.manifest["program"]["plans"])
        return plan_process(self._specs, arena, self._most_rows, self.vocab_size, slots, self.base_bytes)

    def _hold_to_plan(self, allowed: int | None) -> None:
        """Check the plan before the weights are read, and hold allocations to it. Raises ``DoesNotFit``."""
        plan = self.memory_plan()
        plan.check(available_memory(), "is available", taken=True)
        if allowed is not None:
            plan.check(allowed, "--memory allows")
        self.ledger.hold(plan.by_name())
        self.ledger.charge("intermediate values", pages(self.program.reserved_bytes))
        self.ledger.charge("logits", pages(self._logits.nbytes))

    def _group(self, entry: dict[str, Any]) -> StateGroup:
        if entry["addressing"] != "paged":
            raise ArtifactError(
                f"state group {entry['name']} is addressed by {entry['addressing']}, which CPU programs do not run yet"
            )
        members = [s for s in self.manifest["states"] if s["group"] == entry["index"]]
        nbytes = sum(kv_block_bytes(s["dtype"], s["heads"], s["dim"]) for s in members)
        return StateGroup(entry["name"], "paged", BLOCK_SIZE, nbytes, entry["window"])

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights in memory."""
        return self.weights.size if self.weights is not None else 0

    @property
    def leaves_host_free(self) -> bool:
        """True where the process may use more cores than a step's threads take."""
        return self.threads < len(os.sched_getaffinity(0))

    def allocate(self, num_blocks: int, max_num_seqs: int) -> SamplingTables:
        """Reserve ``num_blocks`` blocks in each group (touched when first written) and the sampling tables."""
        self.num_blocks = num_blocks
        for entry in self.manifest["states"]:
            size = kv_block_bytes(entry["dtype"], entry["heads"], entry["dim"]) * num_blocks
            self._states[entry["name"]] = Region(size, f"{num_blocks} KV blocks of {entry['name']}")
            self.ledger.charge("KV cache", pages(size))
        self.program.bind(self._addresses, {name: region.address for name, region in self._states.items()})
        self.sampler = Sampler(self.library, self.vocab_size, max_num_seqs, self.threads)
        self.ledger.charge("sampling tables", pages(table_bytes(max_num_seqs)))
        return self.sampler.tables

    def bucket_of(self, step: StepInputs) -> int:
        """Index of the smallest bucket that holds the step. Raises ``StepTooLarge``."""
        size = len(step.token_ids), len(step.seq_lens), len(step.sample_rows), step.max_query
        for index in self._order:
            if self.buckets[index].fits(*size):
                return index
        raise StepTooLarge(
            f"no bucket holds a step of {len(step.token_ids)} tokens, {len(step.seq_lens)} sequences and "
            f"{len(step.sample_rows)} rows; the largest is {max(self.buckets, key=lambda b: b.tokens)}"
        )

    def forward(self, step: StepInputs) -> None:
        """Run one step; the library releases the GIL. Negative token ids are the slots' last tokens."""
        plan = self.bucket_of(step)
        pending = step.token_ids < 0
        if pending.any():  # the host runs a step ahead: these tokens are known here only
            step.token_ids[pending] = self.sampler.tables.last_token[-1 - step.token_ids[pending]]
        self._rows = len(step.sample_rows)
        dims = {"T": len(step.token_ids), "S": len(step.seq_lens), "R": self._rows}
        self.program.run(plan, dims, (), (self._logits.ctypes.data,), step)

    def logits(self) -> Float32:
        """The last forward's logits [R, V]."""
        return self._logits[: self._rows]

    def sample(self, rows: SampleRows) -> Sampled:
        """Choose tokens from the last forward's logits."""
        return self.sampler.sample(self._logits[: self._rows], rows)

    def read_bandwidth(self, seconds: float = 0.3) -> float:
        """GB/s at which the team's threads read the model's own weights: decoding's roofline on this machine."""
        assert self.weights is not None
        count = self.weights.size // 4 // 64 * 64
        best = float("inf")
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            self.library.dll.cllm_read(self.threads, C.c_void_p(self.weights.address), count)
            best = min(best, time.perf_counter() - start)
        return count * 4 / best / 1e9


def _within(manifest: dict[str, Any], buckets: Collection[Bucket]) -> dict[str, Any]:
    """The manifest with these buckets alone."""
    kept = [i for i, b in enumerate(manifest["buckets"]) if Bucket(**b) in buckets]
    plans = manifest["program"]["plans"]
    return manifest | {
        "buckets": [manifest["buckets"][i] for i in kept],
        "program": manifest["program"] | {"plans": [plans[i] for i in kept]},
    }
