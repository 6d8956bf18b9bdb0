"""The way in: a resolved checkpoint to a captured Module, the facts serving needs, and the names of its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from compilerllm.ir.graph import Module
from compilerllm.ir.recipe import Read, Recipe
from compilerllm.ir.types import TensorType
from compilerllm.kernels.launch.dtypes import IR_DTYPES
from compilerllm.kernels.launch.files import GgufFile
from compilerllm.kernels.launch.weights import DummySource, SourceSpec, WeightSource
from compilerllm.models.capture import Captured, build_skeleton, capture, parameter_types
from compilerllm.models.expected import expected_tensors
from compilerllm.models.facts import ModelFacts, generation_config, model_facts
from compilerllm.models.gguf_names import gguf_table
from compilerllm.models.pooled import pooled_facts
from compilerllm.models.resolve import ResolvedCheckpoint
from compilerllm.models.tasks import Task, first_position
from compilerllm.models.tokenizer import gguf_generation
from compilerllm.models.weights import Names, conversion_table


@dataclass(frozen=True, eq=False)
class CapturedModel:
    """A model ready for the passes.

    module: the captured form. names: binds parameters to the checkpoint after the passes. weights: what the server opens
    (``SourceSpec``). captured: what was swapped and what stayed opaque, for ``explain``. pooled: for a model that gives no
    tokens, how its rows become vectors or labels (``pooled_facts``).
    """

    module: Module
    facts: ModelFacts
    names: Names
    weights: SourceSpec
    captured: Captured
    pooled: Mapping[str, Any] | None = None


def capture_checkpoint(
    checkpoint: ResolvedCheckpoint, *, keep_packed: bool = False, task: Task = "generate"
) -> CapturedModel:
    """Capture a checkpoint's model. ``keep_packed``: GGUF matrices in Q4_0, Q4_1 or Q8_0 stay so, where linears and
    embeddings read them. Raises ``ModelError`` or ``WeightError``.
    """
    skeleton = build_skeleton(checkpoint.config, checkpoint.dtype, task)
    types, tied = parameter_types(skeleton)
    spec = checkpoint.weights
    if spec.kind == "dummy":
        spec = replace(spec, tensors={n: (t.dtype, _shape(t)) for n, t in types.items() if n not in tied})
    if spec.kind == "expected":
        source: WeightSource = DummySource(expected_tensors(skeleton, types, tied))
        spec = SourceSpec("safetensors")
    else:
        source = spec.open()
    names = Names(_table(checkpoint, spec, skeleton, types, source), types, tied, source)
    packed = (
        {n: p for n in types if (p := names.packed_dtype(n))} if keep_packed and spec.kind == "gguf" else {}
    )
    captured = capture(checkpoint.config, checkpoint.dtype, packed=packed, skeleton=skeleton, task=task)
    generation = _generation(checkpoint)
    dtype = IR_DTYPES[checkpoint.dtype]
    facts = model_facts(checkpoint.name, checkpoint.config, dtype, _windows(captured.module), generation)
    pooled = None
    if task != "generate":
        pooled = pooled_facts(checkpoint, captured.module, skeleton, task)
        most = facts.max_positions - first_position(skeleton)
        facts = replace(facts, max_positions=min(most, pooled.pop("max_tokens") or most))
    return CapturedModel(captured.module, facts, names, spec, captured, pooled)


def _shape(type: TensorType) -> tuple[int, ...]:
    return tuple(int(d) for d in type.shape)


def _table(
    checkpoint: ResolvedCheckpoint,
    spec: SourceSpec,
    skeleton: Any,
    types: Mapping[str, TensorType],
    source: WeightSource,
) -> Mapping[str, Recipe]:
    match spec.kind:
        case "safetensors":
            return conversion_table(skeleton, source)
        case "gguf":
            return gguf_table(str(checkpoint.scheme), checkpoint.config, types, source)
    return {name: Read(name) for name in source.names()}


def _generation(checkpoint: ResolvedCheckpoint) -> dict[str, Any]:
    if checkpoint.kind == "gguf" and checkpoint.path is not None:
        return gguf_generation(GgufFile(checkpoint.path))
    return generation_config(checkpoint.path)


def _windows(module: Module) -> tuple[int, ...]:
    found = {
        n.integer("window", 0)
        for graph in module.functions.values()
        for n in graph.nodes
        if n.op == "attention"
    }
    return tuple(sorted(found - {0}))
