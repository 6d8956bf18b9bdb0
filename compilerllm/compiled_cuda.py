"""A compiled model on a GPU: launches per bucket over planned memory, replayed as graphs, one step ahead of the host.

Nothing in ``enqueue`` waits for the device: step inputs go through pinned buffers, tokens of the step before are read
where they were sampled, and results come back behind an event.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from compilerllm.artifact import ArtifactInvalid, read_manifest
from compilerllm.compiled import StepTooLarge
from compilerllm.cuda_program import DEFAULT_OPTIONS, CudaPending, code_bytes, read_program
from compilerllm.cuda_program import CudaOptions as CudaOptions
from compilerllm.errors import CompilerLLMError
from compilerllm.ir.step import (
    Bucket,
    Float32,
    Int32,
    Sampled,
    SampleRows,
    SamplingTables,
    StateGroup,
    StepInputs,
)
from compilerllm.kernel_times import KernelTiming, read_rate, time_kernels
from compilerllm.kernels.errors import ArtifactError
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.launch.gpu import memory
from compilerllm.kernels.launch.gpu.backend import Backend, BoundPlan, CudaBackend, LoadedProgram
from compilerllm.kernels.launch.gpu.graphs import GraphSet, OnCapture, Recipe, captured_buckets
from compilerllm.kernels.launch.gpu.memory import CUDA, PLAIN, ModelSizes, ProgramSizes
from compilerllm.kernels.launch.gpu.parameters import Placement, load_parameters
from compilerllm.kernels.launch.gpu.program import Addresses, Kernel, Launch, samples_all
from compilerllm.kernels.launch.gpu.sampler import SamplerMaker, StepSampler
from compilerllm.kernels.launch.gpu.sampling import BIASES, TABLES, GpuSampler
from compilerllm.kernels.launch.gpu.steps import RING, StepStage
from compilerllm.kernels.launch.memory_plan import MemoryPlan
from compilerllm.kernels.launch.packing import ParameterSpec
from compilerllm.kernels.launch.weights import DummySource, WeightSource
from compilerllm.picks import Bench, Picker, Picks, full_step, picks_file

log = logging.getLogger(__name__)
OnBytes = Callable[[int, int], None]


class NoForward(CompilerLLMError):
    """Sampling or logits asked for before any step."""


class CudaModel:
    """An ``AsyncExecutable`` made from an artifact for CUDA. ``load`` is the way to get one."""

    asynchronous: Literal[True] = True
    leaves_host_free = True

    def __init__(
        self, folder: Path, manifest: dict[str, Any], backend: Backend, options: CudaOptions = DEFAULT_OPTIONS,
        sampler: SamplerMaker | None = None,
    ) -> None:  # fmt: skip
        """``sampler`` in place of the artifact's own sampling program."""
        self.folder, self.manifest, self.options = folder, manifest, options
        self.facts: dict[str, Any] = manifest["facts"]
        self.vocab_size = int(manifest["vocab_size"])
        self.max_model_len = int(manifest["max_model_len"])
        whole = read_program(folder, manifest, whole=True)
        whole = whole if options.buckets is None else whole.within(options.buckets)
        file = options.picks and picks_file(options.picks, str(manifest.get("id")), backend.chip)
        self._picker = Picker(whole, file, options.pick_seconds)
        self.program = self._picker.program
        self.buckets = tuple(plan.bucket for plan in self.program.plans)
        self._order = sorted(
            range(len(self.buckets)), key=lambda i: (self.buckets[i].tokens, self.buckets[i].rows)
        )
        self._bounds = np.array([_size(self.buckets[i]) for i in self._order], np.int64)
        self._samples_all = np.array([samples_all(self.buckets[i]) for i in self._order])
        self.groups = tuple(self._group(g) for g in manifest["groups"])
        self.placement = Placement.of(
            ParameterSpec.parse(p["name"], p["dtype"], p["shape"], p["recipe"])
            for p in manifest["parameters"]
        )
        self.sampling = read_program(folder, manifest, "sampling") if "sampling" in manifest else None
        self._make_sampler: SamplerMaker = sampler or self._own_sampler
        self._logits_dtype = TORCH_DTYPES[manifest.get("logits_dtype", "f32")]
        self.sizes = self._sizes()
        self._backend = backend
        self._loaded = backend.load(self.program, folder)
        self._weights: torch.Tensor | None = None
        self._params: Mapping[str, int] = {}
        self._plans: dict[int, BoundPlan] = {}
        self.graphs = GraphSet()
        self.start_seconds: dict[str, float] = {}  # where the start went
        self.num_blocks = 0  # KV blocks of each group, from ``allocate`` on
        self._last: tuple[int, int] | None = None  # bucket and rows of the last step

    @staticmethod
    def load(
        folder: Path,
        source: WeightSource,
        *,
        backend: Backend | None = None,
        options: CudaOptions = DEFAULT_OPTIONS,
        sampler: SamplerMaker | None = None,
        on_progress: OnBytes | None = None,
        memory: int | None = None,
    ) -> "CudaModel":
        """Open the artifact in ``folder``, put its weights on the device, and reserve a step's memory.

        ``memory``: bytes that the process may take of the device; the plan is held against them and against what is
        free before anything is allocated. Raises ``DoesNotFit``, ``ArtifactInvalid``, ``ArtifactError``, the driver's
        errors (``NoGpu``, ``DriverTooOld``, ``WrongDevice``, ``MissingKernel``, ``DeviceOutOfMemory``) and the weight
        source's. ``on_progress`` gets bytes done and in all.
        """
        manifest = read_manifest(folder)
        if manifest is None:
            raise ArtifactInvalid(
                f"{folder} holds no finished artifact. Build it with `compilerllm compile`."
            )
        if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            options = replace(options, check_launches=True)
        if backend is None:
            backend = CudaBackend(int(manifest["capability"]))
        model = CudaModel(folder, manifest, backend, options, sampler)
        model._hold_to_plan(memory)
        made_up = options.made_up_on_device and isinstance(source, DummySource)
        start = time.perf_counter()
        model._weights, model._params = load_parameters(
            backend, model.placement, source, made_up=made_up, on_progress=on_progress
        )
        model.start_seconds["weights"] = time.perf_counter() - start
        model._reserve()
        return model

    def _group(self, entry: dict[str, Any]) -> StateGroup:
        if entry["addressing"] != "paged":
            raise ArtifactError(
                f"state group {entry['name']} is addressed by {entry['addressing']}, which CUDA programs do not run yet"
            )
        members = [s for s in self.manifest["states"] if s["group"] == entry["index"]]
        nbytes = sum(memory.state_block_bytes(s) for s in members)
        return StateGroup(entry["name"], "paged", memory.BLOCK_SIZE, nbytes, entry["window"])

    # -- memory ---------------------------------------------------------------------------------------------------

    def _hold_to_plan(self, allowed: int | None) -> None:
        """Check the plan before the first allocation, and hold every later one to it. Raises ``DoesNotFit``."""
        plan = self.memory_plan()
        plan.check(self._backend.memory()[0], "is free on the GPU", taken=True)
        if allowed is not None:
            plan.check(allowed, "--memory allows")
        limits = memory.allocated(plan)
        if allowed is None:
            del limits[BIASES]  # nothing was promised: as much as the device has
        if self._own_sampler != self._make_sampler:
            del limits[TABLES]
        self._backend.ledger.hold(limits)

    def _reserve(self) -> None:
        """What every step writes, shared by all buckets: it runs one step at a time."""
        backend = self._backend
        self._arena = backend.allocate(self.sizes.arena, "intermediate values")
        self._logits_memory = backend.allocate(self.sizes.logits, "logits")
        self._counters = backend.allocate(4 * max(1, self.program.counters), "intermediate values")
        backend.do(lambda: void(self._counters.zero_()))
        self._stage = StepStage(
            backend, self.buckets, len(self.groups), memory.table_columns(self.max_model_len)
        )
        self._ends = cycle([backend.mark() for _ in range(RING)])  # of steps that sample nothing

    def _sizes(self) -> ModelSizes:
        program = ProgramSizes.of(self.program)
        if self._picker.unknown:  # a candidate may want the library's workspace
            program = replace(program, library=ProgramSizes.of(self._picker.whole).library)
        return ModelSizes(
            program, None if self.sampling is None else ProgramSizes.of(self.sampling),
            self.placement.nbytes, self.vocab_size, self._logits_dtype.itemsize, len(self.groups), self.max_model_len,
            code_bytes(self.manifest, self.program, self.sampling), self._uses_graphs, self.options.max_graph_tokens,
        )  # fmt: skip

    @property
    def _captured(self) -> list[int]:
        return captured_buckets(self.buckets, self.options.max_graph_tokens) if self._uses_graphs else []

    @property
    def _uses_graphs(self) -> bool:
        return self.options.graphs and not self.options.check_launches

    def memory_plan(self, max_num_seqs: int | None = None) -> MemoryPlan:
        """Predicted bytes of everything but KV blocks, from the artifact alone."""
        overhead = CUDA if self._backend.shares_device else PLAIN
        return memory.plan_model(self.sizes, max_num_seqs, overhead)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on the device."""
        return self.placement.nbytes

    def count_blocks(
        self, utilization: float, max_num_seqs: int, max_model_len: int, *,
        kv_cache_bytes: int | None = None, num_blocks: int | None = None, memory_bytes: int | None = None,
    ) -> int:  # fmt: skip
        """Blocks of each paged group that fit, after ``load`` and before ``allocate``. Raises ``NoRoomForStates``.

        ``utilization`` is the share of the device's memory that the process may use in all; ``memory_bytes`` in its
        place are what it may use by the plan.
        """
        plan, (free, total) = self.memory_plan(max_num_seqs), self._backend.memory()
        to_come = plan["graphs"] + plan[TABLES] + plan["library workspace"] + plan[BIASES]
        flag = "--memory-utilization"
        if memory_bytes is None:
            budget = memory.state_budget(total, free, utilization, to_come)
        else:
            flag, granule = "--memory", CUDA.granule if self._backend.shares_device else PLAIN.granule
            budget = memory.planned_budget(plan, memory_bytes, granule)
        budget = memory.limit_bytes(budget, kv_cache_bytes, flag)
        blocks = memory.count_blocks(budget, self.groups, max_num_seqs, max_model_len, num_blocks, flag)
        nbytes = memory.state_offsets(self.manifest["states"], blocks)[1]
        if memory_bytes is not None and nbytes > free - to_come:
            raise memory.NoRoomForStates(
                f"--memory allows {blocks} KV blocks, {nbytes / 2**20:,.0f} MiB, but {(free - to_come) / 2**20:,.0f} MiB of "
                "GPU memory are free beside what else is planned. Lower --memory, or free memory (nvidia-smi shows who "
                "has it)."
            )
        return blocks

    def allocate(
        self, num_blocks: int, max_num_seqs: int, on_capture: OnCapture | None = None
    ) -> SamplingTables:
        """Reserve ``num_blocks`` KV blocks in each group and the sampling tables, then capture the graphs. Once."""
        backend, self.num_blocks = self._backend, num_blocks
        backend.attach()
        starts, nbytes = memory.state_offsets(self.manifest["states"], num_blocks)
        self._states = backend.allocate(nbytes, "KV cache")
        backend.do(lambda: void(self._states.zero_()))  # masked lanes of a block must not be NaN
        self._state_addresses = {
            s["name"]: self._states.data_ptr() + at
            for s, at in zip(self.manifest["states"], starts, strict=True)
        }
        rows = max(b.rows for b in self.buckets)
        self._logits = backend.tensor(
            self._logits_memory.data_ptr(), self._logits_dtype, (rows, self.vocab_size)
        )
        self.sampler: StepSampler = self._make_sampler(
            backend, self._logits, max_num_seqs, self._stage.address
        )
        if self._picker.unknown:
            self._pick()
        if self._uses_graphs:
            self._capture(on_capture)
        return self.sampler.tables

    def _own_sampler(self, backend: Backend, logits: torch.Tensor, slots: int, step: int) -> StepSampler:
        if self.sampling is None:
            raise ArtifactError(f"{self.folder} has no sampling program. Build the artifact again.")
        loaded = backend.load(self.sampling, self.folder)
        return GpuSampler(backend, self.sampling, loaded, logits, slots, step)

    @property
    def picks(self) -> Picks:
        """Which candidates run, and how that came about."""
        return self._picker.picks

    def card_lines(self) -> dict[str, str]:
        """What is known from ``allocate`` on, for a card."""
        return {"picks": text} if (text := self.picks.text()) else {}

    def _pick(self) -> None:
        """Measure candidates that nothing is known of; from then on there are the picked ones alone."""
        backend = self._backend
        loaded = backend.load(self._picker.whole, self.folder)
        self.program = self._picker.measure(self._bench(loaded))
        for done in (loaded, self._loaded):
            done.unload()
        self._loaded = backend.load(self.program, self.folder)
        backend.do(lambda: void(self._states.zero_()))

    def bench(self) -> Bench:
        """The program with all candidates, loaded beside the picked one, to time them with. After ``allocate``."""
        self._backend.attach()
        return self._bench(self._backend.load(self._picker.whole, self.folder))

    def _bench(self, loaded: LoadedProgram) -> Bench:
        def send(index: int) -> None:
            bucket = self.buckets[index]
            self._stage.send(index, full_step(self, bucket), None, _size(bucket)[:3])

        return Bench(
            self._picker.whole, self._backend, lambda i, plan: loaded.bind(plan, self._addresses(i)), send,
            self.peak_bandwidth, self.peak_tflops,
        )  # fmt: skip

    def _capture(self, on_capture: OnCapture | None) -> None:
        """Run every captured bucket once on an empty step, launch by launch, then capture them all."""
        start, nodes = time.perf_counter(), memory.variant_nodes(self.sizes.sampling)
        recipes = []
        for bucket in self._captured:
            plan, b = self._plan(bucket), self.buckets[bucket]
            self._stage.send_empty(bucket, _size(b)[:3])
            plan.run_checked(self._backend.synchronize)
            count = len(plan.launches)
            recipes.append(Recipe(bucket, "", b.tokens, count, plan.run))
            if b.max_query > 1:
                continue
            for variant in self.sampler.variants:
                sample = self.sampler.work(variant, b.rows, self._row_slots(bucket))
                sample()
                both = partial(_in_order, plan.run, sample)
                recipes.append(Recipe(bucket, variant, b.tokens, count + nodes.get(variant, 1), both))
        self._backend.synchronize()
        first = time.perf_counter()
        self.graphs.capture(self._backend, recipes, on_capture)
        self.start_seconds |= {"first runs": first - start, "capture": time.perf_counter() - first}

    def _row_slots(self, bucket: int) -> int:
        return self._stage.address + self._stage.offsets(bucket)["row_slots"]

    def _plan(self, bucket: int) -> BoundPlan:
        """A bucket's launches, packed when first asked for."""
        if bucket not in self._plans:
            self._plans[bucket] = self._loaded.bind(self.program.plans[bucket], self._addresses(bucket))
        return self._plans[bucket]

    def _addresses(self, bucket: int) -> Addresses:
        return Addresses(
            params=self._params, states=self._state_addresses, tables=self.sampler.addresses,
            arena=self._arena.data_ptr(), logits=self._logits_memory.data_ptr(),
            counters=self._counters.data_ptr(), step_base=self._stage.address, step=self._stage.offsets(bucket),
        )  # fmt: skip

    # -- steps ----------------------------------------------------------------------------------------------------

    def bucket_of(self, step: StepInputs) -> int:
        """Index of the smallest bucket that holds the step. Raises ``StepTooLarge``."""
        size = (len(step.token_ids), len(step.seq_lens), len(step.sample_rows), step.max_query)
        fits = np.all(self._bounds >= size, axis=1)
        if size[2] != size[0]:
            fits &= ~self._samples_all
        first = int(fits.argmax())
        if not fits[first]:
            raise StepTooLarge(
                f"no bucket holds a step of {size[0]} tokens, {size[1]} sequences and {size[2]} rows; the largest is "
                f"{max(self.buckets, key=lambda b: b.tokens)}"
            )
        return self._order[first]

    def enqueue(self, step: StepInputs, rows: SampleRows | None) -> CudaPending:
        """Start forward and, with ``rows``, sampling; return at once.

        Raises ``StepTooLarge``, and ``KernelFault`` where the device has failed.
        """
        self._backend.attach()
        variant = self.sampler.prepare(rows) if rows is not None else ""
        joined = self._forward(step, None if rows is None else rows.slots, variant)
        if rows is None:
            mark = next(self._ends)
            mark.record()
            return CudaPending(self._backend, self._last_bucket, mark.wait)
        return self._sampled(rows, joined)

    def enqueue_forward(self, step: StepInputs, slots: Int32) -> None:
        """``enqueue`` without sampling, which ``enqueue_sample`` does when the host knows what may come."""
        self._backend.attach()
        self._forward(step, slots, "")

    def enqueue_sample(self, rows: SampleRows) -> CudaPending:
        """Sample the rows of the step whose forward was enqueued last."""
        self._backend.attach()
        self.sampler.prepare(rows)
        return self._sampled(rows, joined=False)

    def _forward(self, step: StepInputs, slots: Int32 | None, variant: str) -> bool:
        """Send and start a step. Whether its graph samples too, as ``variant`` says."""
        bucket = self.bucket_of(step)
        replay = self.graphs.find(bucket, variant) if variant else None
        joined = replay is not None
        if replay is None:
            replay = self.graphs.find(bucket, "")
        exact = len(step.token_ids), len(step.seq_lens), len(step.sample_rows)
        sizes = exact if replay is None else _size(self.buckets[bucket])[:3]
        self._stage.send(bucket, step, slots, sizes, self.sampler.next_result)
        self._last = bucket, exact[2]
        if replay is not None:
            replay()
        else:
            self._run(bucket, exact)
        return joined

    @property
    def _last_bucket(self) -> Bucket:
        assert self._last is not None, "no step has been sent"
        return self.buckets[self._last[0]]

    def _sampled(self, rows: SampleRows, joined: bool) -> CudaPending:
        assert self._last is not None, "no step has been sent"
        if not joined:
            self.sampler.run(rows, self._row_slots(self._last[0]))
        return CudaPending(self._backend, self._last_bucket, self.sampler.collect(rows))

    def _run(self, bucket: int, sizes: tuple[int, int, int]) -> None:
        """Launch by launch, at the step's own sizes."""
        plan = self._plan(bucket)
        plan.size(_dims(*sizes))
        if self.options.check_launches:
            plan.run_checked(self._backend.synchronize)
        else:
            plan.run()

    def launches_of(self, step: StepInputs) -> tuple[Sequence[Launch], Sequence[Kernel]]:
        """What a step launches at its own sizes, in order, and the kernels that the launches number. For profiles."""
        bucket = self.bucket_of(step)
        plan = self._plan(bucket)
        plan.size(_dims(len(step.token_ids), len(step.seq_lens), len(step.sample_rows)))
        return tuple(plan.launches), self.program.kernels

    def run_plain(self, step: StepInputs) -> None:
        """Run a step's forward launch by launch, at its own sizes, and wait for it. For profiles."""
        self._backend.attach()
        bucket = self.bucket_of(step)
        sizes = len(step.token_ids), len(step.seq_lens), len(step.sample_rows)
        self._stage.send(bucket, step, None, sizes)
        self._run(bucket, sizes)
        self._backend.synchronize()

    def time_kernels(self, sequences: int, query: int, context: int) -> list[KernelTiming]:
        """What each kernel of a step takes. Raises as ``kernel_times.time_kernels`` does."""
        return time_kernels(self, sequences, query, context)

    @property
    def peak_bandwidth(self) -> float:
        """GB/s of the target's typical card, measured on one."""
        return float(self.manifest["peak_bandwidth"])

    @property
    def peak_tflops(self) -> float:
        """TFLOP/s of dense bf16 products on the target's typical card, measured on one."""
        return float(self.manifest["peak_tflops"])

    def read_bandwidth(self) -> float:
        """GB/s at which this device reads the weights, measured now. After ``load``."""
        assert self._weights is not None
        self._backend.attach()
        return read_rate(self._backend, self._weights)

    def forward(self, step: StepInputs) -> None:
        """Run one step and wait for it."""
        self.enqueue(step, None).result()

    def sample(self, rows: SampleRows) -> Sampled:
        """Choose tokens from the last step's logits."""
        self._backend.attach()
        bucket, count = self._ran()
        self.sampler.prepare(rows)
        self._stage.send_row_slots(bucket, rows.slots, count)
        self.sampler.run(rows, self._row_slots(bucket))
        return self.sampler.collect(rows)()

    def logits(self) -> Float32:
        """The last step's logits [R, V]."""
        self._backend.attach()
        _, count = self._ran()
        size = count * self.vocab_size
        nbytes = size * self._logits_dtype.itemsize
        staging = self._backend.staging(nbytes)
        if nbytes:
            self._backend.download(staging.data_ptr(), self._logits_memory.data_ptr(), nbytes)
        self._backend.synchronize()
        values = staging[:nbytes].view(self._logits_dtype).view(count, self.vocab_size)
        result: Float32 = values.to(torch.float32).numpy()
        return result

    def _ran(self) -> tuple[int, int]:
        if self._last is None:
            raise NoForward("no step has run yet: call forward first")
        return self._last


def _size(bucket: Bucket) -> tuple[int, int, int, int]:
    return bucket.tokens, bucket.sequences, bucket.rows, bucket.max_query


def void(result: object) -> None:
    """Forget a result: for lambdas that are run for what they do."""


def _dims(tokens: int, sequences: int, rows: int) -> dict[str, int]:
    return {"T": tokens, "S": sequences, "R": rows}


def _in_order(*works: Callable[[], None]) -> None:
    for work in works:
        work()
