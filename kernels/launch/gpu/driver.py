"""The CUDA driver as serving needs it: a device that fits the artifact, kernels from cubins, launches, events, copies.

torch owns the device's primary context and all memory; modules and launches go past it. Launches are called through
ctypes: with everything packed beforehand such a call costs the host a fraction of what a wrapper with checks costs.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from compilerllm.kernels.errors import KernelError

LaunchFunction = Callable[[int, int, int, int], int]  # config, function, parameters, extra (0) -> CUresult
_STICKY = frozenset({700, 702, 709, 710, 714, 715, 716, 717, 718, 719})  # the context is lost after these
_OUT_OF_MEMORY = 2
# A kernel that fails takes the context with it, so that the step cannot be run again to see which one it was.
NAME_IT = ", with CUDA_LAUNCH_BLOCKING=1 to have the kernel's IR node and module named"


class CudaError(KernelError):
    """A call of the driver that failed."""


class NoGpu(CudaError):
    """No CUDA device, no driver, or a torch without CUDA."""


class DriverTooOld(CudaError):
    """The driver is older than the CUDA that torch and the kernels were built with."""


class WrongDevice(CudaError):
    """An artifact whose machine code this GPU cannot run."""


class MissingKernel(CudaError):
    """A cubin that the artifact lacks, or a kernel that its cubin lacks."""


class UnsupportedLaunch(CudaError):
    """A kernel with needs that the launcher does not know: scratch memory, descriptors."""


class KernelFault(CudaError):
    """A kernel that did not launch, or that failed while it ran."""


class DeviceOutOfMemory(CudaError):
    """The device has less memory than asked for."""


@dataclass(frozen=True)
class Device:
    """The GPU in use. capability 90 is 9.0; driver 13000 is CUDA 13.0; bytes of memory in all and free at the start."""

    index: int
    name: str
    capability: int
    driver: int
    total: int
    free: int


def diagnose(built_with: str | None, available: bool, driver: int | None) -> None:
    """Raise ``NoGpu`` or ``DriverTooOld`` with what is missing.

    built_with: torch's CUDA version ("13.0"), None for a torch without CUDA; driver: the CUDA version that the driver
    knows (12040 is 12.4), None where there is no driver.
    """
    if built_with is None:
        raise NoGpu(
            f"torch {torch.__version__} is built without CUDA. Install torch for CUDA, or use a CPU target."
        )
    needed = int(built_with.split(".")[0]) * 1000
    if driver is not None and driver < needed:
        raise DriverTooOld(
            f"the NVIDIA driver knows CUDA {_version(driver)}, but torch {torch.__version__} and the kernels need "
            f"CUDA {_version(needed)} or newer. Update the driver, or install torch for CUDA {driver // 1000}."
        )
    if not available:
        found = "no driver" if driver is None else f"a driver for CUDA {_version(driver)}, but no device"
        raise NoGpu(
            f"no CUDA GPU can be used: {found} was found. Check nvidia-smi and CUDA_VISIBLE_DEVICES, or use a CPU target."
        )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def check_capability(built_for: int, device: int, name: str) -> None:
    """Raise ``WrongDevice`` where machine code for ``built_for`` (90 is 9.0) does not run on ``device``."""
    if device // 10 != built_for // 10 or device < built_for:
        raise WrongDevice(
            f"the artifact is built for sm_{built_for}, but {name} is sm_{device}. Build one on this "
            "machine, or for it with `compilerllm compile --target`."
        )


@cache
def bindings() -> Any:
    """``cuda.bindings.driver``. Raises ``NoGpu`` where the package is missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NoGpu(f"cuda-bindings is not installed ({error}). pip install 'compilerllm[cuda]'.") from error
    return driver


def driver_version() -> int | None:
    """The CUDA version that the driver knows, 13000 for 13.0; None where there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    return version.value if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


def open_device(capability: int, index: int = 0) -> Device:
    """Make torch's context on a GPU that runs machine code for ``capability``.

    Raises ``NoGpu``, ``DriverTooOld``, ``WrongDevice``.
    """
    version = driver_version()
    diagnose(torch.version.cuda, torch.cuda.is_available(), version)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.set_device(index)
    found = torch.cuda.get_device_properties(index)
    check_capability(capability, found.major * 10 + found.minor, found.name)
    torch.zeros(1, device=f"cuda:{index}")  # makes the context
    free, total = torch.cuda.mem_get_info(index)
    return Device(index, found.name, found.major * 10 + found.minor, version or 0, total, free)


class Driver:
    """Checked calls. ``api`` is ``cuda.bindings.driver``, or what stands in for it in tests."""

    def __init__(self, api: Any = None) -> None:
        self.api = bindings() if api is None else api

    def check(self, result: tuple[Any, ...], what: str) -> Any:
        """The call's value. Raises ``KernelFault`` where the context is lost, ``CudaError`` otherwise."""
        code = int(result[0])
        if code:
            raise self.error(code, what)
        return result[1] if len(result) == 2 else None

    def error(self, code: int, what: str) -> CudaError:
        """The error for a CUresult; ``what`` failed."""
        if code == _OUT_OF_MEMORY:
            return DeviceOutOfMemory(f"{what}: the GPU is out of memory. Lower --memory-utilization.")
        if code in _STICKY:
            return KernelFault(
                f"{what}: {self.describe(code)}. The GPU's context is lost; start again{NAME_IT}."
            )
        return CudaError(f"{what}: {self.describe(code)}")

    def describe(self, code: int) -> str:
        """A CUresult's name and meaning."""
        texts = []
        for ask in (self.api.cuGetErrorName, self.api.cuGetErrorString):
            status, text = ask(self.api.CUresult(code))
            texts.append(text.decode() if int(status) == 0 and text is not None else str(code))
        return f"{texts[0]} ({texts[1]})"

    def load(self, code: bytes, name: str, shared: int, what: str) -> tuple[Any, int]:
        """A module and its function ``name``, allowed ``shared`` bytes of dynamic shared memory.

        The module must be kept: the function lives as long as it. Raises ``MissingKernel`` for an unknown name.
        """
        api = self.api
        module = self.check(api.cuModuleLoadData(code), f"loading {what}")
        status, function = api.cuModuleGetFunction(module, name.encode())
        if int(status):
            raise MissingKernel(
                f"{what} has no kernel {name}: {self.describe(int(status))}. Build the artifact again."
            )
        if shared > 48 << 10:
            limit = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.check(
                api.cuFuncSetAttribute(function, limit, shared),
                f"{what}: asking for {shared:,} bytes of shared memory",
            )
        return module, int(function)

    def unload(self, module: Any) -> None:
        """Give back a module's memory, once nothing runs of it any more."""
        self.check(self.api.cuModuleUnload(module), "unloading a kernel")

    def launch_function(self) -> LaunchFunction:
        """``cuLaunchKernelEx`` on addresses: no checks, no conversions; releases the GIL."""
        call = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
        call.argtypes = [ctypes.c_void_p] * 4
        call.restype = ctypes.c_int
        return call

    def upload(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from pinned host memory; returns before it is done."""
        if code := int(self.api.cuMemcpyHtoDAsync(target, source, nbytes, stream)[0]):
            raise self.error(code, f"copying {nbytes:,} bytes to the GPU")

    def download(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy to pinned host memory; returns before it is done."""
        if code := int(self.api.cuMemcpyDtoHAsync(target, source, nbytes, stream)[0]):
            raise self.error(code, f"copying {nbytes:,} bytes from the GPU")

    def synchronize(self, stream: int, what: str = "waiting for the GPU") -> None:
        """Wait for all work of the stream. Raises ``KernelFault`` for a kernel that failed."""
        self.check(self.api.cuStreamSynchronize(stream), what)


_SPINS = 200  # polls before the thread waits in the driver: about as long as the tail of a small step


class CudaMark:
    """A point in the stream that the host can wait for."""

    def __init__(self, driver: Driver, stream: int) -> None:
        self._driver, self._stream = driver, stream
        self._event = driver.check(driver.api.cuEventCreate(2), "making an event")  # 2: without timing

    def record(self) -> None:
        """The point is after all work given to the stream so far."""
        if code := int(self._driver.api.cuEventRecord(self._event, self._stream)[0]):
            raise self._driver.error(code, "recording an event")

    def done(self) -> bool:
        """Whether the work before the point has ended."""
        code = int(self._driver.api.cuEventQuery(self._event)[0])
        if code not in (0, 600):  # 600: not ready
            raise self._driver.error(code, "a step on the GPU")
        return code == 0

    def wait(self) -> None:
        """Until ``done``: polls a moment, then waits in the driver with the GIL released."""
        for _ in range(_SPINS):
            if self.done():
                return
        self._driver.check(self._driver.api.cuEventSynchronize(self._event), "a step on the GPU")
