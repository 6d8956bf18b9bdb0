"""What a model on a GPU is made from: how it is to run, the programs of its artifact, steps on their way."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compilerllm.artifact import ArtifactInvalid
from compilerllm.ir.step import Bucket, Sampled
from compilerllm.kernels.launch.gpu.backend import Backend
from compilerllm.kernels.launch.gpu.driver import KernelFault
from compilerllm.kernels.launch.gpu.program import Program


@dataclass(frozen=True)
class CudaOptions:
    """How a model runs on its device.

    graphs: steps are captured; mixed ones of up to ``max_graph_tokens`` tokens. check_launches: no graphs, and the host
    waits after every launch, so that a kernel that fails is named; CUDA_LAUNCH_BLOCKING=1 in the environment says so too.
    made_up_on_device: dummy weights are made there (uniform within 0.001), not those that the dummy checkpoint would give.
    buckets: those of the artifact's that will be needed; None: all. pick_seconds: for measuring candidates that
    ``picks``, a folder, has nothing of; 0: the default candidates run, whatever it has.
    """

    graphs: bool = True
    max_graph_tokens: int = 512
    check_launches: bool = False
    made_up_on_device: bool = True
    buckets: tuple[Bucket, ...] | None = None
    pick_seconds: float = 0.0
    picks: Path | None = None


DEFAULT_OPTIONS = CudaOptions()


class CudaPending:
    """A step on its way."""

    def __init__(self, backend: Backend, bucket: Bucket, finish: Callable[[], Sampled | None]) -> None:
        self._backend, self._bucket, self._finish = backend, bucket, finish

    def result(self) -> Sampled | None:
        """Wait for the step. Raises ``KernelFault`` where a kernel failed."""
        self._backend.attach()
        try:
            return self._finish()
        except KernelFault as error:
            raise KernelFault(f"in the bucket of {self._bucket.tokens} tokens: {error}") from error


def read_program(
    folder: Path, manifest: Mapping[str, Any], part: str = "program", whole: bool = False
) -> Program:
    """A program of the artifact, with the default of each choice; ``whole``: with all candidates.

    Raises ``ArtifactInvalid`` for a file that is no program, ``ArtifactError`` by its ABI.
    """
    path = folder / str(manifest[part])
    try:
        entry = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ArtifactInvalid(
            f"{path} cannot be read ({error}). Delete {folder} to build it again."
        ) from error
    program = Program.from_json(entry)
    return program if whole else program.picked()


def code_bytes(manifest: Mapping[str, Any], *programs: Program | None) -> int:
    """Bytes of the cubins that these programs load."""
    files = manifest.get("files", {})
    keys = {k.key for p in programs if p is not None for k in p.kernels if k.key}
    entries = (files.get(f"kernels/{key}.cubin") for key in keys)
    return sum(int(e["bytes"]) for e in entries if e)
