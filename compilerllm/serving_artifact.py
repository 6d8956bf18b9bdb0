"""Which artifact an engine runs: one that was named, or the cache's, and whether it is one for what was asked.

Loads no torch: a server's own process asks here too, before it starts an engine.
"""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compilerllm.artifact import ArtifactInvalid, artifact_path, read_manifest
from compilerllm.bundle import WrongTarget, open_artifact
from compilerllm.cache import explain_miss, is_usable
from compilerllm.checkpoint import locate
from compilerllm.compiler import CompileRequest, Found, OnStage, artifact_key, ensure_artifact
from compilerllm.config import EngineConfig, flag_of
from compilerllm.coverage import Limits, check_entries, check_limits
from compilerllm.errors import CompilerLLMError
from compilerllm.kernels.launch.gpu.probe import find_gpu
from compilerllm.kernels.launch.machine import host_features
from compilerllm.targets import is_cuda, target_name

MADE_UP = "dummy"


class ArtifactMissing(CompilerLLMError):
    """No artifact is there, and none may be built."""


class ArtifactDiffers(ArtifactInvalid):
    """An artifact that was built otherwise than the flags say."""


def find_artifact(config: EngineConfig, on_stage: OnStage | None = None) -> Found:
    """The artifact for a configuration: the one that a face found, or that it names, else the cache's, built where that has
    none and it may be.

    Raises ``ArtifactMissing`` where it may not, ``ArtifactDiffers``, ``ArtifactTooSmall``, and what opening or building
    raises.
    """
    if config.found:
        return Found(Path(config.found), True, 0.0)
    if config.start.artifact is not None:
        begin = time.perf_counter()
        path = open_artifact(Path(config.start.artifact), _target_asked(config))
        check_named(path, manifest_of(path), config)
        return Found(path, True, time.perf_counter() - begin)
    request, place = CompileRequest.of(config), locate(config.model.model)
    if config.start.may_build:
        return ensure_artifact(request, place, on_stage)
    begin = time.perf_counter()
    path = _require_artifact(request, place)
    return Found(path, True, time.perf_counter() - begin)


def settle(config: EngineConfig, found: Found) -> EngineConfig:
    """The configuration for an engine: with what was found, and a named artifact's own limits where none were asked for."""
    config = dataclasses.replace(config, found=str(found.path))
    if config.start.artifact is None:
        return config
    built = Limits.built(manifest_of(found.path))
    own = {
        name: getattr(built, name)
        for name in ("max_num_seqs", "max_num_batched_tokens")
        if name not in config.given
    }
    return dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, **own))


def manifest_of(artifact: Path) -> dict[str, Any]:
    """Its manifest, with every file verified. Raises ``ArtifactInvalid``."""
    manifest = read_manifest(artifact)
    if manifest is None:
        raise ArtifactInvalid(f"{artifact} holds no finished artifact.")
    check_entries(artifact, manifest)
    return manifest


def check_named(path: Path, manifest: Mapping[str, Any], config: EngineConfig) -> None:
    """Raise what an artifact that was named, not looked up by what is asked for, may be wrong in: machine, flags, limits."""
    check_here(path, manifest)
    fields, model, given = manifest["key"]["fields"], config.model, config.given
    differ = []
    for name, asked, built in (
        ("optimization_level", model.optimization_level, manifest["level"]),
        ("dtype", model.dtype, fields["dtype"]),
        ("weights", model.weights, fields["weights"]),
        ("skip_passes", ",".join(model.skipped), ",".join(fields.get("passes.skip") or ())),
    ):
        if name in given and asked not in ("auto", built):
            differ.append(f"{flag_of(name)} is {asked}, and it was built with {built}")
    if manifest["source"]["kind"] == MADE_UP and model.load_format != MADE_UP:
        differ.append("it was built for made-up weights, and --load-format dummy is not given")
    if (
        model.load_format == MADE_UP
        and manifest["source"]["kind"] != MADE_UP
        and not is_cuda(manifest["target"])
    ):
        differ.append(
            "--load-format is dummy, and on a CPU that wants an artifact that was built with --load-format dummy"
        )
    if differ:
        raise ArtifactDiffers(
            f"{path} is built otherwise than is asked for: {'; '.join(differ)}. Leave the flags out, or build an artifact "
            "with them."
        )
    asked_for: dict[str, int] = {
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "max_model_len": config.model.max_model_len or 1,
    }
    limits = {n: v for n, v in asked_for.items() if n in given}
    check_limits(path, manifest, dataclasses.replace(Limits.built(manifest), **limits))


def check_here(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raise ``WrongTarget`` where this machine does not run the artifact's target, with what each of them has."""
    target = manifest["target"]
    if not is_cuda(target):
        lacking = sorted(set(manifest["features"]) - host_features())
        if lacking:
            raise WrongTarget(
                f"{path} is built for {target}, but this processor has no {', '.join(lacking)}. Build one for this machine."
            )
        return
    gpu = find_gpu()
    if gpu is None:
        raise WrongTarget(
            f"{path} is built for {target}, but this machine has no GPU that the CUDA driver finds. Build one for its "
            "processor (--target cpu), or check nvidia-smi."
        )
    if target_name("cuda") != target:
        raise WrongTarget(
            f"{path} is built for {target}, but {gpu.name} has compute capability {gpu.capability / 10:.1f}. Build one for "
            f"{target_name('cuda')}."
        )


def origin(config: EngineConfig, found: Found) -> str:
    """Where an artifact came from, for a card."""
    if config.start.artifact is not None:
        return f"from {config.start.artifact}"
    return "found in the cache" if found.hit else f"built in {found.seconds:.1f} s"


def _target_asked(config: EngineConfig) -> str | None:
    return None if config.model.device == "auto" else target_name(config.model.device)


def _require_artifact(request: CompileRequest, place: Path) -> Path:
    key = artifact_key(request, place)
    path = artifact_path(key.digest)
    if not is_usable(path):
        raise ArtifactMissing(
            f"the cache has no artifact of {request.model} for {request.target} as it is asked for: "
            f"{explain_miss(key.fields)}. --require-artifact forbids building one: name one with --artifact, or build it "
            "with the same flags."
        )
    return path
