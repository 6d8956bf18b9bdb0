"""CUDA targets by compute capability. A target is named, so an artifact built without a GPU says where it runs."""

from dataclasses import dataclass

from compilerllm.kernels.errors import KernelError


@dataclass(frozen=True)
class CudaTarget:
    """``capability`` 90 is 9.0. shared: bytes of dynamic shared memory a block may have. pdl: programmatic dependent
    launch. bandwidth in GB/s and tflops (dense bf16) are a typical card's: the cost model's, not a promise."""

    name: str
    capability: int
    chip: str
    sms: int
    shared: int
    pdl: bool
    bandwidth: float
    tflops: float
    l2: int

    @property
    def arch(self) -> str:
        """As nvcc names it."""
        return f"sm_{self.capability}"


TARGETS: tuple[CudaTarget, ...] = (
    CudaTarget("sm_80", 80, "A100", 108, 166_912, False, 1900, 280, 40 << 20),
    CudaTarget("sm_89", 89, "L40S", 142, 101_376, False, 800, 300, 96 << 20),
    CudaTarget("sm_90", 90, "H200", 132, 232_448, True, 4350, 755, 60 << 20),
    CudaTarget("sm_100", 100, "B200", 148, 232_448, True, 7200, 1800, 126 << 20),
)


class UnknownCudaTarget(KernelError):
    """A target's name that this version does not build for."""


def find_cuda_target(name: str) -> CudaTarget:
    """The target called ``name`` (sm_90). Raises ``UnknownCudaTarget`` listing what there is."""
    for target in TARGETS:
        if target.name == name:
            return target
    raise UnknownCudaTarget(
        f"unknown CUDA target {name!r}; this version builds for {', '.join(t.name for t in TARGETS)}"
    )
