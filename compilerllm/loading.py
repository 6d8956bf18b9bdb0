"""From an engine's configuration to a model that runs: find, compile if need be, load. Called in the engine process."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from compilerllm.artifact import read_manifest
from compilerllm.checkpoint import locate
from compilerllm.compiled import CompiledModel
from compilerllm.compiler import CompileRequest, Found, OnStage, ensure_artifact
from compilerllm.config import EngineConfig
from compilerllm.environment import num_threads
from compilerllm.errors import CompilerLLMError
from compilerllm.ir.step import Executable
from compilerllm.kernels.errors import KernelError
from compilerllm.kernels.launch.errors import WeightError
from compilerllm.kernels.launch.weights import SourceSpec
from compilerllm.runtime.memory import available_memory
from compilerllm.runtime.messages import ModelFacts

if TYPE_CHECKING:
    from compilerllm.kernels.reference.model import ReferenceModel


class ModelDoesNotFit(CompilerLLMError):
    """The weights need more memory than there is."""


def find_artifact(config: EngineConfig, on_stage: OnStage | None = None) -> Found:
    """The artifact for a configuration, built where the cache has none. Faces call it too: the tokenizer is in it."""
    place = locate(config.model.model)
    return ensure_artifact(CompileRequest.of(config), place, on_stage)


def tokenizer_dir(artifact: Path) -> Path:
    """The artifact's folder for the text layer: tokenizer.json, templates, generation_config.json."""
    return artifact / "tokenizer"


def load_engine_model(config: EngineConfig) -> tuple[Executable, ModelFacts]:
    """The executable and what the startup card says of it. Raises ``CompilerLLMError`` with the reason."""
    found = find_artifact(config)
    manifest = read_manifest(found.path)
    assert manifest is not None, "ensure_artifact gave a finished artifact"
    place = locate(config.model.model)
    start = time.perf_counter()
    try:
        model = load_compiled(found.path, place)
    except (KernelError, WeightError) as error:
        raise CompilerLLMError(str(error)) from error
    loaded = time.perf_counter() - start
    origin = "found in the cache" if found.hit else f"{found.seconds:.1f} s"
    buckets = model.buckets
    decode = [b.sequences for b in buckets if b.max_query == 1]
    card = {
        "model": f"{config.model.display_name} ({manifest['facts']['architecture']}, {manifest['facts']['dtype']})",
        "target": f"{manifest['target']}, {num_threads()} threads, level O{manifest['level']}",
        "buckets": f"{len(decode)} decode ({decode[0]} to {decode[-1]} sequences), {len(buckets) - len(decode)} mixed "
        f"(up to {max(b.tokens for b in buckets)} tokens)",
        "memory": memory_line(model),
        "compile": f"{origin}; weights loaded in {loaded:.1f} s",
    }
    return model, ModelFacts(model=config.model.display_name, target=manifest["target"], card=card)


def load_compiled(artifact: Path, place: Path) -> "CompiledModel | ReferenceModel":
    """Open an artifact with its checkpoint's weights. Level O0 runs the reference interpreter instead of a program."""
    manifest = read_manifest(artifact)
    if manifest is None:
        raise CompilerLLMError(f"{artifact} holds no finished artifact. Build it with `compilerllm compile`.")
    spec = SourceSpec.from_json(manifest["source"] | {"path": str(place)})
    if manifest["level"] == 0:
        return load_reference(artifact, manifest, spec)
    need = sum(_nbytes(p["dtype"], p["shape"]) for p in manifest["parameters"])
    free = available_memory()
    if need > free:
        raise ModelDoesNotFit(
            f"the weights need {need / 2**20:,.0f} MiB, but {free / 2**20:,.0f} MiB of memory are available. "
            "Free memory, use a quantised checkpoint, or a machine with more."
        )
    return CompiledModel.load(artifact, spec.open())


def load_reference(artifact: Path, manifest: dict[str, object], spec: SourceSpec) -> "ReferenceModel":
    """Level O0: the served module through plain torch operators, for debugging."""
    from compilerllm.ir.recipe import parse_recipe
    from compilerllm.ir.step import Bucket
    from compilerllm.ir.text import parse_module
    from compilerllm.kernels.launch.weights import execute
    from compilerllm.kernels.reference.model import ReferenceModel

    source = spec.open()
    path = artifact / "module.ir"
    module = parse_module(path.read_text(), str(path))
    parameters: list[dict[str, str]] = manifest["parameters"]  # type: ignore[assignment]
    params = {p["name"]: execute(parse_recipe(p["recipe"]), source, name=p["name"]) for p in parameters}
    buckets = tuple(Bucket(**b) for b in manifest["buckets"])  # type: ignore[attr-defined]
    return ReferenceModel(module, params, max_model_len=int(str(manifest["max_model_len"])), buckets=buckets)


def memory_line(model: "CompiledModel | ReferenceModel") -> str:
    """Weights and working memory for the card."""
    if isinstance(model, CompiledModel):
        return f"weights {model.weight_bytes / 2**20:,.0f} MiB, intermediate values {model.program.arena_bytes / 2**20:,.0f} MiB"
    return "reference operators, not planned"


def _nbytes(dtype: str, shape: list[int]) -> int:
    """Bytes of a stored parameter, padding left out."""
    count = 1
    for extent in shape:
        count *= extent
    per_block = {"q4_0": 18, "q4_1": 20, "q8_0": 34}
    widths = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "bf16": 2, "f16": 2, "i16": 2}
    return count // 32 * per_block[dtype] if dtype in per_block else count * widths.get(dtype, 1)
