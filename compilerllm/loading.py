"""From an engine's configuration to a model that runs: find, compile if need be, load. Called in the engine process."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from compilerllm import compile_watch
from compilerllm.artifact import cutlass_line, opaque_line, read_manifest
from compilerllm.checkpoint import locate
from compilerllm.compiled import CompiledModel
from compilerllm.config import EngineConfig
from compilerllm.coverage import Limits, check_coverage
from compilerllm.environment import cache_dir, num_threads
from compilerllm.errors import CompilerLLMError, InvalidParameter
from compilerllm.ir.recipe import parse_recipe
from compilerllm.ir.step import Bucket, Executable
from compilerllm.kernels.errors import KernelError
from compilerllm.kernels.launch.errors import WeightError
from compilerllm.kernels.launch.weights import SourceSpec, execute
from compilerllm.matching import check_model
from compilerllm.picks import SECONDS
from compilerllm.runtime.messages import ModelFacts, PoolingFacts
from compilerllm.serving_artifact import MADE_UP, find_artifact, manifest_of, origin
from compilerllm.targets import is_cuda

if TYPE_CHECKING:
    from compilerllm.compiled_cuda import CudaModel
    from compilerllm.kernels.reference.model import ReferenceModel


GRAPH_LEVEL = 2  # from here on a GPU's steps are graphs


def tokenizer_dir(artifact: Path) -> Path:
    """The artifact's folder for the text layer: tokenizer.json, templates, generation_config.json."""
    return artifact / "tokenizer"


def load_engine_model(config: EngineConfig) -> tuple[Executable, ModelFacts]:
    """The executable and what the startup card says of it. Raises ``CompilerLLMError`` with the reason."""
    with compile_watch.asked_for_by(f"loading {config.model.display_name}"):
        found = find_artifact(config)
    manifest = manifest_of(found.path)
    made_up = config.start.artifact is not None and config.model.load_format == MADE_UP
    place = None if made_up else locate(config.model.model)
    start = time.perf_counter()
    try:
        needed = check_coverage(found.path, manifest, Limits.of(config, manifest))
        if config.start.artifact is not None and place is not None:
            check_model(manifest, place)
        picks = None if config.start.deterministic else cache_dir() / "picks"
        model = load_compiled(found.path, place, config.cache.memory_bytes, buckets=needed, picks=picks)
    except (KernelError, WeightError) as error:
        raise CompilerLLMError(str(error)) from error
    loaded = time.perf_counter() - start
    built = "found in the cache" if found.hit else f"{found.seconds:.1f} s"
    buckets = model.buckets
    decode = [b.sequences for b in buckets if b.max_query == 1]
    pooled = manifest.get("pooling") is not None
    if manifest["level"] == 0:
        where = "torch operators on the CPU"
    elif is_cuda(manifest["target"]):
        where = manifest["target"]
    else:
        where = f"{manifest['target']}, {num_threads()} threads"
    card = {
        "model": f"{config.model.display_name} ({manifest['facts']['architecture']}, {manifest['facts']['dtype']})",
        "target": f"{where}, level O{manifest['level']}",
        "buckets": f"{len(buckets)} (up to {max(b.tokens for b in buckets)} tokens)"
        if pooled
        else f"{len(decode)} decode ({decode[0]} to {decode[-1]} sequences), {len(buckets) - len(decode)} mixed "
        f"(up to {max(b.tokens for b in buckets)} tokens)",
        "artifact": f"{manifest['id'][:12]} {origin(config, found)}",
        "memory": memory_line(model),
        "compile": f"{built if config.start.artifact is None else 'nothing'}; weights loaded in {loaded:.1f} s",
    }
    if opaque := opaque_line(manifest):
        card["opaque"] = opaque
    if cutlass := cutlass_line(manifest):
        card["cutlass"] = cutlass
    tokenizer = str(tokenizer_dir(found.path)) if manifest["tokenizer"] else ""
    return model, ModelFacts(
        model=config.model.display_name,
        target=manifest["target"],
        card=card,
        tokenizer=tokenizer,
        pooling=pooling_facts(config, manifest),
    )


def pooling_facts(config: EngineConfig, manifest: dict[str, Any]) -> PoolingFacts | None:
    """How the model pools: as the artifact says, or ``--pooling``. Raises ``InvalidParameter`` where that cannot be."""
    if manifest.get("pooling") is None:
        if config.model.runner == "pooling":
            raise InvalidParameter(
                "--runner is pooling, but this artifact is for generating text. Build one with --runner pooling.",
                "runner",
            )
        if config.model.pooling != "auto":
            raise InvalidParameter(
                f"--pooling is {config.model.pooling}, but this model generates text. Say --runner pooling to get embeddings "
                "of it.",
                "pooling",
            )
        return None
    facts = msgspec.convert(manifest["pooling"], PoolingFacts)
    if config.model.runner == "generate":
        raise InvalidParameter(
            f"--runner is generate, but this artifact is for {facts.task}ing. Build one with --runner generate.",
            "runner",
        )
    if config.model.pooling == "auto":
        return facts
    if facts.task == "classify":
        raise InvalidParameter(
            f"--pooling is {config.model.pooling}, but a classifier's head looks at the token that it was trained for. "
            "Leave --pooling out.",
            "pooling",
        )
    return msgspec.structs.replace(facts, pooling=config.model.pooling)


def load_compiled(
    artifact: Path, place: Path | None, memory: int | None = None, *,
    buckets: tuple[Bucket, ...] | None = None, picks: Path | None = None,
) -> "CompiledModel | CudaModel | ReferenceModel":  # fmt: skip
    """Open an artifact with its checkpoint's weights. Level O0 runs the reference interpreter instead of a program.

    place: None for made-up weights. memory: bytes that the process, or of a GPU the model, may take. buckets: those that
    will be needed, by default all. picks: where picks among candidates are kept; None: default candidates run.
    """
    manifest = read_manifest(artifact)
    if manifest is None:
        raise CompilerLLMError(f"{artifact} holds no finished artifact. Build it with `compilerllm compile`.")
    spec = SourceSpec.from_json(manifest["source"] | {"path": str(place or "")})
    if place is None and spec.kind != MADE_UP:
        spec = SourceSpec(MADE_UP)
    if manifest["level"] == 0:
        return load_reference(artifact, manifest, spec)
    if is_cuda(manifest["target"]):
        from compilerllm.compiled_cuda import CudaModel, CudaOptions

        options = CudaOptions(
            graphs=manifest["level"] >= GRAPH_LEVEL,
            buckets=buckets,
            picks=picks,
            pick_seconds=SECONDS if picks else 0.0,
        )
        return CudaModel.load(artifact, spec.open(), options=options, memory=memory)
    return CompiledModel.load(artifact, spec.open(), memory=memory, buckets=buckets)


def load_reference(artifact: Path, manifest: dict[str, Any], spec: SourceSpec) -> "ReferenceModel":
    """Level O0: the served module through plain torch operators, for debugging. Imports what a warm server must not."""
    from compilerllm.ir.text import parse_module
    from compilerllm.kernels.reference.model import ReferenceModel

    source = spec.open()
    path = artifact / "module.ir"
    module = parse_module(path.read_text(), str(path))
    params = {
        p["name"]: execute(parse_recipe(p["recipe"]), source, name=p["name"]) for p in manifest["parameters"]
    }
    buckets = tuple(Bucket(**b) for b in manifest["buckets"])
    return ReferenceModel(module, params, max_model_len=manifest["max_model_len"], buckets=buckets)


def memory_line(model: "CompiledModel | CudaModel | ReferenceModel") -> str:
    """Weights and working memory for the card."""
    if isinstance(model, CompiledModel):
        return f"weights {model.weight_bytes / 2**20:,.0f} MiB, intermediate values {model.program.arena_bytes / 2**20:,.0f} MiB"
    plan = getattr(model, "memory_plan", None)
    return str(plan().text()) if plan is not None else "reference operators, not planned"
