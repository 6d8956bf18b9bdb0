"""Whether there is a GPU, asked of the driver alone: no torch, no CUDA context."""

import ctypes
from dataclasses import dataclass
from functools import cache

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


@dataclass(frozen=True)
class Gpu:
    """The first device: name, compute capability (90 = 9.0), memory in bytes, and the driver's CUDA version (13000)."""

    name: str
    capability: int
    memory: int
    driver: int


@cache
def find_gpu() -> Gpu | None:
    """The first CUDA device, or None where there is no driver or no device."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, device, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or count.value < 1:
        return None
    if cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    numbers = []
    for attribute in (_MAJOR, _MINOR):
        if cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return None
        numbers.append(value.value)
    name, memory, version = ctypes.create_string_buffer(128), ctypes.c_size_t(), ctypes.c_int()
    cuda.cuDeviceGetName(name, 128, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    return Gpu(name.value.decode(), 10 * numbers[0] + numbers[1], memory.value, version.value)
