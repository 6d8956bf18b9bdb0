"""CPU targets: which instructions a build may use. A target is named, never ``-march=native``, so artifacts travel."""

from dataclasses import dataclass

from compilerllm.kernels.errors import KernelError
from compilerllm.kernels.launch.machine import host_features

_COMMON = (
    "-std=c++17", "-O2", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-pthread",
    # A library keeps its thread pool to itself, however many are loaded.
    "-fvisibility=hidden", "-fno-gnu-unique",
    "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)  # fmt: skip


@dataclass(frozen=True)
class CpuTarget:
    """A named instruction set: compiler flags, the CPU features it needs, the weight layouts its kernels read."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]  # names as in /proc/cpuinfo
    bf16_weights: str = "n16k2"
    f32_weights: str = "n16"

    @property
    def compile_flags(self) -> tuple[str, ...]:
        """Everything the compiler is told, the instruction set included."""
        return (*_COMMON, *self.flags)


_AVX512 = (
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mfma",
    "-mf16c",
    "-mprefer-vector-width=512",
)
TARGETS: tuple[CpuTarget, ...] = (
    CpuTarget(
        "cpu-avx512bf16-amx",
        (*_AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        frozenset(
            {
                "avx512f",
                "avx512bw",
                "avx512vl",
                "avx512dq",
                "avx512_bf16",
                "avx512_vnni",
                "amx_tile",
                "amx_bf16",
            }
        ),
    ),
    CpuTarget(
        "cpu-avx512", _AVX512, frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"})
    ),
    CpuTarget("cpu-avx2", ("-mavx2", "-mfma", "-mf16c"), frozenset({"avx2", "fma", "f16c"})),
    CpuTarget("cpu-generic", (), frozenset()),
)


class UnknownTarget(KernelError, ValueError):
    """A target's name that this version does not build for."""


def find_target(name: str) -> CpuTarget:
    """The target called ``name``; ``cpu`` is this machine's best. Raises ``UnknownTarget`` listing what there is."""
    if name in ("cpu", "auto"):
        return host_target()
    for target in TARGETS:
        if target.name == name:
            return target
    raise UnknownTarget(
        f"unknown target {name!r}; this version builds for {', '.join(t.name for t in TARGETS)}, or 'cpu' for this machine"
    )


def host_target() -> CpuTarget:
    """The best target this machine can run."""
    features = host_features()
    return next(t for t in TARGETS if t.features <= features)
