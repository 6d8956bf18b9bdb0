"""The device that runs a GPU's kernels one by one: the GPU itself, or Triton's interpreter where there is none."""

from compilerllm.kernels.launch.gpu.backend import Backend
from compilerllm.kernels.triton.target import find_cuda_target

INTERPRETED_BYTES = 64 << 30  # what the interpreter's device says it has; pages are taken as they are written


def find_backend(target: str) -> tuple[Backend, bool]:
    """A backend for a target, and whether it is a real GPU's."""
    import torch

    found = find_cuda_target(target)
    if torch.cuda.is_available() and _capability() == found.capability:
        from compilerllm.kernels.launch.gpu.backend import CudaBackend

        return CudaBackend(found.capability), True
    from compilerllm.kernels.triton.interpreted_backend import InterpretedBackend

    return InterpretedBackend(INTERPRETED_BYTES), False


def _capability() -> int:
    import torch

    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor
