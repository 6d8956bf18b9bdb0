"""What a plan is made for: an artifact, or a model drafted without compiling anything."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from compilerllm.artifact import artifact_path, read_manifest
from compilerllm.compiler import CompileRequest, artifact_key, find_build_target, make_buckets
from compilerllm.cuda_artifact import cuda_buckets, flat_module, prepare_bucket
from compilerllm.cuda_program import DEFAULT_OPTIONS, code_bytes, read_program
from compilerllm.environment import cache_dir
from compilerllm.errors import CompilerLLMError
from compilerllm.ir.graph import Module
from compilerllm.ir.recipe import parse_recipe
from compilerllm.ir.step import Bucket, StateGroup
from compilerllm.ir.text import parse_module
from compilerllm.kernels.groups import state_entries
from compilerllm.kernels.launch.cpu_memory import arena_bytes, plan_process, state_bytes
from compilerllm.kernels.launch.gpu import memory as gpu
from compilerllm.kernels.launch.gpu.parameters import Placement
from compilerllm.kernels.launch.gpu.program import Program
from compilerllm.kernels.launch.library import KV_BLOCK, kv_block_bytes
from compilerllm.kernels.launch.memory_plan import MemoryPlan
from compilerllm.kernels.launch.packing import ParameterSpec
from compilerllm.kernels.triton.target import CudaTarget
from compilerllm.loading import GRAPH_LEVEL

# Bytes of a cubin where none is compiled yet: of two models' 147 and 158 for sm_90 the means were 20,291 and 18,219.
KERNEL_BYTES = 20 << 10
OnPart = Callable[[int, int], None]


class CannotPlan(CompilerLLMError):
    """A model or artifact whose memory is not planned."""


@dataclass(frozen=True)
class Limits:
    """What a plan depends on beside the model: sequences at once, tokens of a step, the longest context."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class Subject:
    """A model for one target. ``origin`` says where the plan comes from."""

    def __init__(
        self, origin: str, module: Callable[[], Module], parameters: Sequence[ParameterSpec], facts: Mapping[str, Any],
        target: str, level: int, limits: Limits, request: CompileRequest | None, place: Path | None,
        folder: Path | None = None, manifest: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """``limits``: those that it was built with, or is to be; ``folder`` and ``manifest``: of the artifact."""
        self.origin, self._read, self.parameters, self.facts = origin, module, parameters, facts
        self.target, self.level, self.limits = find_build_target(target), level, limits
        self.request, self.place, self.folder, self.manifest = request, place, folder, manifest
        self.drafted = 0  # buckets that were drafted so far
        self.on_part: OnPart = lambda done, total: None
        self._sizes: dict[Bucket, gpu.ProgramSizes] = {}
        self._samplings: dict[tuple[int, ...], gpu.ProgramSizes] = {}
        self._sources: dict[
            Bucket | tuple[int, ...], set[Any]
        ] = {}  # kernels of a bucket, of a sampling program

    @property
    def on_gpu(self) -> bool:
        """Whether the memory is a GPU's."""
        return isinstance(self.target, CudaTarget)

    @property
    def vocab(self) -> int:
        """Rows of the output projection."""
        return int(self.facts["vocab_size"])

    @cached_property
    def module(self) -> Module:
        """After the pipeline."""
        return self._read()

    @cached_property
    def states(self) -> list[dict[str, Any]]:
        """Every state of the model, with its group's index."""
        entries: list[dict[str, Any]] = self._entries["states"]
        return entries

    @cached_property
    def _entries(self) -> Mapping[str, Any]:
        return self.manifest if self.manifest is not None else state_entries(self.module)

    def block_bytes(self, state: Mapping[str, Any]) -> int:
        """Bytes of a KV block of one state."""
        if self.on_gpu:
            return gpu.state_block_bytes(state)
        return kv_block_bytes(state["dtype"], state["heads"], state["dim"])

    @cached_property
    def groups(self) -> tuple[StateGroup, ...]:
        """As the executable has them."""
        size = gpu.BLOCK_SIZE if self.on_gpu else KV_BLOCK
        return tuple(
            StateGroup(
                g["name"], g["addressing"], size,
                sum(self.block_bytes(s) for s in self.states if s["group"] == g["index"]), g["window"],
            )
            for g in self._entries["groups"]
        )  # fmt: skip

    def kv_bytes(self, num_blocks: int) -> int:
        """What so many blocks in each group take."""
        if self.on_gpu:
            return gpu.state_offsets(self.states, num_blocks)[1]
        return state_bytes(self.states, num_blocks)

    def buckets(self, limits: Limits) -> tuple[Bucket, ...]:
        """As a build with these limits has them."""
        make = cuda_buckets if self.on_gpu else make_buckets
        return make(limits.max_num_seqs, limits.max_num_batched_tokens)

    def plan(self, limits: Limits, base: int = 0) -> MemoryPlan:
        """Everything but the KV blocks. base: on a CPU, bytes of the process with nothing loaded."""
        if self.on_gpu:
            return gpu.plan_model(self._gpu_sizes(limits), limits.max_num_seqs)
        buckets = self.buckets(limits)
        built = self._is_built(limits)
        plans = (
            self.manifest["program"]["plans"]
            if built and self.manifest is not None
            else self._cpu_plans(buckets)
        )
        rows = max(b.rows for b in buckets)
        specs = self.parameters if self.manifest is not None else self._cpu_draft[1]
        return plan_process(specs, arena_bytes(plans), rows, self.vocab, limits.max_num_seqs, base)

    def _is_built(self, limits: Limits) -> bool:
        """Whether the artifact has been built with limits that have the same buckets."""
        return self.manifest is not None and self.buckets(limits) == self.buckets(self.limits)

    # -- a GPU's ----------------------------------------------------------------------------------------------------

    def _gpu_sizes(self, limits: Limits) -> gpu.ModelSizes:
        weights = Placement.of(self.parameters).nbytes
        graphs = self.level >= GRAPH_LEVEL
        common = (weights, self.vocab, 4, len(self.groups), limits.max_model_len)
        if self._is_built(limits):
            forward, sampling, code = self._built
            return gpu.ModelSizes(forward, sampling, *common, code, graphs, DEFAULT_OPTIONS.max_graph_tokens)
        buckets = self.buckets(limits)
        missing = [b for b in buckets if b not in self._sizes]
        for done, bucket in enumerate(missing):
            self.on_part(done, len(missing))
            self._sizes[bucket] = gpu.ProgramSizes.of(self._draft(bucket))
        self.on_part(len(missing), len(missing))
        parts = [self._sizes[b] for b in buckets]
        forward = gpu.ProgramSizes(
            tuple(plan for part in parts for plan in part.plans),
            max(part.counters for part in parts),
            any(part.library for part in parts),
        )
        rows = tuple(sorted({b.rows for b in buckets}))
        sampling = self._sampling(rows)
        kernels = self._sources[rows].union(*(self._sources[b] for b in buckets))
        code, most = KERNEL_BYTES * len(kernels), DEFAULT_OPTIONS.max_graph_tokens
        return gpu.ModelSizes(forward, sampling, *common, code, graphs, most, code_known=False)

    @cached_property
    def _built(self) -> tuple[gpu.ProgramSizes, gpu.ProgramSizes, int]:
        assert self.folder is not None and self.manifest is not None
        programs = [read_program(self.folder, self.manifest, part) for part in ("program", "sampling")]
        parts = [gpu.ProgramSizes.of(program) for program in programs]
        return parts[0], parts[1], code_bytes(self.manifest, *programs)

    @cached_property
    def _flat(self) -> Module:
        return flat_module(self.module)

    @cached_property
    def _chooser(self) -> Any:
        from compilerllm.kernels.tuning import TunedChooser

        assert isinstance(self.target, CudaTarget)
        return TunedChooser.for_target(self.target, cache_dir() / "tuning")

    def _draft(self, bucket: Bucket) -> Program:
        from compilerllm.kernels.triton.emit import draft_program, finish_program

        assert isinstance(self.target, CudaTarget)
        draft = draft_program(self._flat, (bucket,), self.target, self.level, self._chooser, prepare_bucket)
        self.drafted += 1
        self._sources[bucket] = set(draft.sources())
        return finish_program(draft).picked()

    def _sampling(self, rows: tuple[int, ...]) -> gpu.ProgramSizes:
        from compilerllm.kernels.triton.emit_sampling import draft_sampling, finish_sampling

        assert isinstance(self.target, CudaTarget)
        if rows not in self._samplings:
            draft, variants = draft_sampling(self.vocab, rows, self.target, self.level)
            self._sources[rows] = set(draft.sources())
            self._samplings[rows] = gpu.ProgramSizes.of(finish_sampling(draft, variants))
        return self._samplings[rows]

    # -- a CPU's ----------------------------------------------------------------------------------------------------

    @cached_property
    def _cpu_draft(self) -> tuple[Any, Sequence[ParameterSpec]]:
        """The module with its weights' layouts, and the parameters with theirs."""
        from compilerllm.kernels.cpu.select import select_layouts
        from compilerllm.kernels.cpu.target import CpuTarget

        assert isinstance(self.target, CpuTarget)
        if self.manifest is not None:  # its module has them already
            return self.module, self.parameters
        laid_out = select_layouts(self.module, self.target)
        return laid_out, self._bind(laid_out)

    def _bind(self, module: Module) -> Sequence[ParameterSpec]:
        raise CannotPlan("only a drafted model binds its parameters anew")

    def _cpu_plans(self, buckets: Sequence[Bucket]) -> list[dict[str, Any]]:
        from compilerllm.kernels.cpu.emit import emit_program
        from compilerllm.kernels.cpu.target import CpuTarget
        from compilerllm.planning import alias_table, plan_program

        assert isinstance(self.target, CpuTarget)
        module = self._cpu_draft[0]
        program, aliases = emit_program(module, self.target), alias_table(module)
        self.drafted += len(buckets)
        return [plan_program(module, program, bucket, aliases) for bucket in buckets]


class DraftedSubject(Subject):
    """A model that was captured and rewritten, and of which nothing is compiled."""

    def __init__(self, request: CompileRequest, place: Path) -> None:
        """Raises what resolving and capturing raise."""
        from compilerllm.models.model import capture_checkpoint
        from compilerllm.models.resolve import resolve
        from compilerllm.passes.pipeline import Options, run_pipeline

        target, fields = find_build_target(request.target), artifact_key(request, place).fields
        # The type and form of weights that a build would have.
        checkpoint = resolve(str(place), dtype=fields["dtype"], load_format=request.load_format)
        captured = capture_checkpoint(checkpoint, keep_packed=fields["weights"] == "packed")
        options = Options(level=request.level, target=target.name, skip=frozenset(request.skip_passes))
        module = run_pipeline(captured.module, options)[0]
        self._names = captured.names
        facts = captured.facts
        longest = min(request.max_model_len or facts.max_positions, facts.max_positions)
        limits = Limits(request.max_num_seqs, request.max_num_batched_tokens, longest)
        super().__init__(
            "drafted, nothing is compiled", lambda: module, self._bind(module), facts.to_json(), request.target, request.level,
            limits, request, place,
        )  # fmt: skip

    def _bind(self, module: Module) -> Sequence[ParameterSpec]:
        return [
            ParameterSpec(p.name, p.type.dtype, tuple(int(d) for d in p.type.shape), p.recipe)
            for p in self._names.bind_all(module)
        ]


def artifact_subject(
    folder: Path, origin: str, request: CompileRequest | None = None, place: Path | None = None
) -> Subject:
    """Of a built artifact. Raises ``ArtifactInvalid``, and ``CannotPlan`` for one of level 0."""
    manifest = read_manifest(folder)
    assert manifest is not None, "the folder holds a finished artifact"
    if manifest["level"] == 0:
        raise CannotPlan(
            "level O0 runs reference operators, whose memory is not planned. Plan with another --optimization-level."
        )
    path = folder / "module.ir"
    parameters = [
        ParameterSpec(p["name"], p["dtype"], tuple(p["shape"]), parse_recipe(p["recipe"]))
        for p in manifest["parameters"]
    ]
    fields = manifest["key"]["fields"]
    limits = Limits(fields["max_num_seqs"], fields["max_num_batched_tokens"], int(manifest["max_model_len"]))
    facts = manifest["facts"] | {"vocab_size": manifest["vocab_size"]}
    return Subject(
        origin, lambda: parse_module(path.read_text(), str(path)), parameters, facts, manifest["target"],
        int(manifest["level"]), limits, request, place, folder, manifest,
    )  # fmt: skip


def model_subject(request: CompileRequest, place: Path) -> Subject:
    """Of a model: its artifact where the cache has it, otherwise drafted."""
    if request.level == 0:
        raise CannotPlan(
            "level O0 runs reference operators, whose memory is not planned. Plan with another --optimization-level."
        )
    folder = artifact_path(artifact_key(request, place).digest)
    if read_manifest(folder) is not None:
        return artifact_subject(folder, f"the artifact {folder.name[:12]} of the cache", request, place)
    return DraftedSubject(request, place)


def redrafted(subject: Subject, **changes: Any) -> Subject | None:
    """The same model with another level, dtype or form of weights; None where there is only an artifact."""
    if subject.request is None or subject.place is None:
        return None
    return DraftedSubject(replace(subject.request, **changes), subject.place)
