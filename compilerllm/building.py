"""The compiler's child process: builds artifacts of one checkpoint, doing once what several of them share.

``compiler.run_child`` starts it as ``python -m compilerllm.building ORDER PLACE``; it reports stages, what it built and a
last error on standard output.
"""

import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compilerllm import __version__
from compilerllm.artifact import ArtifactInvalid, artifact_path, building, write_log, write_manifest
from compilerllm.cache import is_usable
from compilerllm.compiler import (
    CompileRequest,
    OnStage,
    artifact_key,
    find_build_target,
    make_buckets,
    make_pooling_buckets,
)
from compilerllm.cpu_artifact import write_cpu
from compilerllm.environment import cache_dir
from compilerllm.errors import CompilerLLMError
from compilerllm.kernels.triton.target import CudaTarget
from compilerllm.keys import Key

if TYPE_CHECKING:
    from compilerllm.ir.graph import Module
    from compilerllm.ir.step import Bucket
    from compilerllm.models.model import CapturedModel
    from compilerllm.models.resolve import ResolvedCheckpoint
    from compilerllm.passes.pipeline import Options
    from compilerllm.passes.report import PassReport


class _Stages:
    """Tells of stages as they begin, and how long each took."""

    def __init__(self, on_stage: OnStage) -> None:
        self.seconds: dict[str, float] = {}
        self._on_stage, self._started, self._running = on_stage, time.perf_counter(), ""

    def __call__(self, name: str) -> None:
        """``name`` begins; "compile 12/80" goes on with compile; empty: the last one ended."""
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running] = self.seconds.get(self._running, 0.0) + now - self._started
        self._started, self._running = now, name.partition(" ")[0]
        if name:
            self._on_stage(name)


class Builder:
    """Builds artifacts of the checkpoint at ``place`` into the cache. Errors are the parts' own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._resolved: dict[tuple[str, str], ResolvedCheckpoint] = {}
        self._captured: dict[tuple[str, str, bool, str], CapturedModel] = {}

    def build(self, request: CompileRequest, on_stage: OnStage = lambda stage: None) -> Path:
        """Compile; gives the artifact."""
        from compilerllm.passes.pipeline import run_pipeline

        stage = _Stages(on_stage)
        stage("resolve")  # importing transformers is a good part of it
        target, key = find_build_target(request.target), artifact_key(request, self.place)
        captured = self._capture(request, key, stage)
        stage("passes")
        module, reports = run_pipeline(captured.module, self._options(request, captured))
        if isinstance(target, CudaTarget) and _measures(module, target, request, stage):
            key = artifact_key(request, self.place)  # of what is known now
        with building(key.digest) as folder:
            module, buckets, manifest = _write_program(request, module, captured, folder, stage)
            manifest |= self._manifest(request, key, captured, module, reports, buckets)
            manifest["tokenizer"] = self._write_model(captured, module, folder, request, key)
            stage("")
            write_manifest(folder, manifest)
        path = artifact_path(key.digest)
        times = [{"pass": r.name, "function": r.function, "seconds": round(r.seconds, 6)} for r in reports]
        taken = {k: round(v, 3) for k, v in stage.seconds.items()}
        write_log(path, {"model": _name(request.model), "seconds": taken, "passes": times})
        return path

    def verify(self, request: CompileRequest, on_stage: OnStage = lambda stage: None) -> None:
        """Run every rewrite of the build beside what it replaced, then every kernel that it uses beside the reference.

        Kernels of a CPU target that this machine is not are left out. Raises ``RewriteInvalid`` and ``KernelInvalid``.
        """
        from compilerllm.cuda_artifact import cuda_buckets
        from compilerllm.validation.build import verify_build

        stage = _Stages(on_stage)
        stage("resolve")
        captured = self._capture(request, artifact_key(request, self.place), stage)
        stage("verify")
        verify_build(
            captured.module,
            find_build_target(request.target),
            request.level,
            cuda_buckets(request.max_num_seqs, request.max_num_batched_tokens),
            lambda name, done, total: stage(f"verify {done}/{total}"),
            options=self._options(request, captured),
        ).require()
        self._verify_kernels(request, captured, stage)

    def _verify_kernels(self, request: CompileRequest, captured: "CapturedModel", stage: _Stages) -> None:
        from compilerllm.cuda_artifact import cuda_buckets
        from compilerllm.kernels.launch.machine import host_features
        from compilerllm.kernels.tuning import TunedChooser
        from compilerllm.passes.pipeline import run_pipeline
        from compilerllm.validation.errors import KernelInvalid
        from compilerllm.validation.module_kernels import verify_kernels
        from compilerllm.validation.rewrites import told

        target, chooser = find_build_target(request.target), None
        if isinstance(target, CudaTarget):
            chooser = TunedChooser.for_target(target, cache_dir() / "tuning", 1)
        elif not target.features <= host_features():
            return
        if request.level == 0:  # the reference runs
            return
        found = verify_kernels(
            run_pipeline(captured.module, self._options(request, captured))[0],
            target,
            request.level,
            cuda_buckets(request.max_num_seqs, request.max_num_batched_tokens),
            lambda done, total, title: stage(f"verify-kernels {done}/{total}"),
            chooser,
        )
        if found:
            raise KernelInvalid(told(found))

    def _options(self, request: CompileRequest, captured: "CapturedModel") -> "Options":
        from compilerllm.passes.pipeline import Options

        target = find_build_target(request.target)
        return Options(
            level=request.level,
            target=target.name,
            skip=frozenset(request.skip_passes),
            stateless=captured.pooled is not None,
        )

    def _resolve(self, request: CompileRequest, key: Key) -> "ResolvedCheckpoint":
        from compilerllm.models.resolve import resolve

        # The type that the key says, so that they cannot differ.
        asked = str(key.fields["dtype"]), request.load_format
        if asked not in self._resolved:
            self._resolved[asked] = resolve(str(self.place), dtype=asked[0], load_format=request.load_format)
        return self._resolved[asked]

    def _capture(self, request: CompileRequest, key: Key, stage: _Stages) -> "CapturedModel":
        from compilerllm.models.model import capture_checkpoint

        checkpoint = self._resolve(request, key)
        asked = (
            str(key.fields["dtype"]),
            request.load_format,
            key.fields["weights"] == "packed",
            key.fields["task"],
        )
        if asked not in self._captured:
            stage("capture")
            self._captured[asked] = capture_checkpoint(checkpoint, keep_packed=asked[2], task=asked[3])
        return self._captured[asked]

    def _write_model(
        self, captured: "CapturedModel", module: "Module", folder: Path, request: CompileRequest, key: Key
    ) -> bool:
        """The graphs and the tokenizer; whether there is one."""
        from compilerllm.ir.text import print_module
        from compilerllm.models.tokenizer import export_tokenizer

        (folder / "captured.ir").write_text(print_module(captured.module, origins=True))
        (folder / "module.ir").write_text(print_module(module, origins=True))
        return export_tokenizer(self._resolve(request, key), folder / "tokenizer")

    def _manifest(
        self, request: CompileRequest, key: Key, captured: "CapturedModel", module: "Module",
        reports: "Sequence[PassReport]", buckets: "Sequence[Bucket]",
    ) -> dict[str, Any]:  # fmt: skip
        """What the manifest says of the model and of how it was compiled."""
        from compilerllm.ir.recipe import print_recipe

        facts, pooled = captured.facts, captured.pooled
        return {
            "version": __version__, "key": key.to_json(), "target": key.fields["target"], "level": request.level,
            "facts": facts.to_json() | {"name": ""}, "source": captured.weights.to_json() | {"path": ""},
            "vocab_size": facts.vocab_size if pooled is None else pooled["width"],
            "max_model_len": min(request.max_model_len or facts.max_positions, facts.max_positions)
            if pooled is None
            else min(facts.max_positions, request.max_num_batched_tokens),
            "pooling": pooled,
            "buckets": [dataclasses.asdict(b) for b in buckets],
            "parameters": [
                {"name": p.name, "dtype": p.type.dtype, "shape": list(p.type.shape), "recipe": print_recipe(p.recipe)}
                for p in captured.names.bind_all(module)
            ],
            "passes": [
                {"pass": r.name, "function": r.function, "matches": r.matches,
                 "near_misses": [str(m) for m in r.near_misses], "counts": r.counts}
                for r in reports
            ],
        }  # fmt: skip


def build(request: CompileRequest, place: Path, on_stage: OnStage = lambda stage: None) -> Path:
    """Compile ``place`` into the cache, in this process; gives the artifact. Errors are the parts' own."""
    return Builder(place).build(request, on_stage)


def _write_program(
    request: CompileRequest, module: "Module", captured: "CapturedModel", folder: Path, stage: OnStage
) -> "tuple[Module, Sequence[Bucket], dict[str, Any]]":
    """The target's files; gives the module with its weights' layouts, the buckets, and the manifest's part."""
    target = find_build_target(request.target)
    if isinstance(target, CudaTarget) and request.level > 0:
        from compilerllm.cuda_artifact import cuda_buckets, write_cuda

        buckets = cuda_buckets(request.max_num_seqs, request.max_num_batched_tokens)
        vocab = captured.facts.vocab_size
        return (
            module,
            buckets,
            write_cuda(
                module,
                target,
                buckets,
                request.level,
                vocab,
                folder,
                stage,
                candidates=request.candidates,
                rivals=request.rivals,
            ),
        )
    make = make_buckets if captured.pooled is None else make_pooling_buckets
    buckets = make(request.max_num_seqs, request.max_num_batched_tokens)
    if isinstance(target, CudaTarget) or request.level == 0:
        stage("save")
        return module, buckets, {"program": None, "features": []}
    module, manifest = write_cpu(module, target, buckets, request.level, folder, stage)
    return module, buckets, manifest | {"features": sorted(target.features)}


def _name(model: str) -> str:
    """What to call a model where artifacts are listed: the last part of a path, a hub id as it is."""
    path = Path(model).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def _measures(module: "Module", target: CudaTarget, request: CompileRequest, stage: OnStage) -> bool:
    """At O3, on the target's own machine: time candidates that no tuning data has. Whether there were any."""
    from compilerllm.cuda_artifact import cuda_buckets
    from compilerllm.kernels.cutlass.build import find_supply
    from compilerllm.kernels.triton.emit import cutlass_cache
    from compilerllm.measuring import LEVEL, measure_missing

    if request.level < LEVEL or request.rivals:  # rivals are there to be timed in steps
        return False
    stage("measure")
    buckets = cuda_buckets(request.max_num_seqs, request.max_num_batched_tokens)
    return measure_missing(
        module, target, buckets, find_supply(cutlass_cache(cache_dir() / "kernels")), stage
    )


def _run(order: dict[str, Any], place: Path) -> None:
    """Carry out an order: ``requests``, ``verify``, and ``jobs``, the most processor cores to use (None: all)."""
    if order["jobs"] is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: order["jobs"]])
    builder = Builder(place)
    for number, entry in enumerate(order["requests"]):
        request = CompileRequest.from_json(entry)

        def tell(stage: str, number: int = number) -> None:
            print(f"stage {number} {stage}", flush=True)

        if order["verify"]:
            builder.verify(request, tell)
        path = artifact_path(artifact_key(request, place).digest)
        if not (order["verify"] and _is_built(path)):
            path = builder.build(request, tell)
        print(f"built {number} {path}", flush=True)


def _is_built(path: Path) -> bool:
    try:
        return is_usable(path)
    except ArtifactInvalid:
        return False


def main(arguments: list[str]) -> int:
    """The child: a JSON order (see ``_run``), a place."""
    from compilerllm.ir.errors import IRError
    from compilerllm.kernels.errors import KernelError

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unwinds, so that nothing half built stays
    try:
        _run(json.loads(arguments[0]), Path(arguments[1]))
    except (CompilerLLMError, IRError, KernelError) as error:
        message = str(error)
    except MemoryError:
        message = (
            "memory ran out while compiling. Free some, or compile on a machine with more and copy the cache."
        )
    except Exception as error:  # noqa: BLE001 - a bug; its traceback goes to whoever asks with --debug
        traceback.print_exc()
        said = (str(error).splitlines() or [""])[0]
        message = (
            f"{arguments[1]} cannot be compiled: {type(error).__name__}: {said}. This was not foreseen: if the "
            "checkpoint is sound, please report it with what --debug and `compilerllm collect-env` print."
        )
    else:
        return 0
    print("error " + json.dumps(message), flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
