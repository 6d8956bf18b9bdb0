"""What a user is told when the GPU, the driver or the artifact is not as it must be. The driver is a fake."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compilerllm.kernels.errors import ArtifactError
from compilerllm.kernels.launch.gpu import driver as gpu
from compilerllm.kernels.launch.gpu.backend import CudaProgram, out_of_memory
from compilerllm.kernels.launch.gpu.driver import (
    CudaError,
    CudaMark,
    Driver,
    DriverTooOld,
    KernelFault,
    MissingKernel,
    NoGpu,
    UnsupportedLaunch,
    WrongDevice,
    check_capability,
    diagnose,
)
from compilerllm.kernels.launch.gpu.libraries import find_maker
from compilerllm.kernels.launch.gpu.program import Kernel, Program


class FakeApi:
    """A driver that does what ``codes`` says of a call: 0 unless told."""

    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")

    def __init__(self, **codes: int) -> None:
        self.codes = codes
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args))
            return self.codes.get(name, 0), len(self.calls)

        return call

    def CUresult(self, code: int) -> int:
        return code

    def cuGetErrorName(self, code: int) -> tuple[int, bytes]:
        return 0, f"CUDA_ERROR_{code}".encode()

    cuGetErrorString = cuGetErrorName


def load(kernel: Kernel, folder: Path, api: FakeApi) -> CudaProgram:
    backend: Any = SimpleNamespace(driver=Driver(api))
    return CudaProgram(backend, Program((kernel,), ()), folder)


def test_torch_without_cuda() -> None:
    with pytest.raises(NoGpu, match="built without CUDA"):
        diagnose(None, False, None)


def test_no_driver_and_no_device() -> None:
    with pytest.raises(NoGpu, match="no driver was found"):
        diagnose("13.0", False, None)
    with pytest.raises(NoGpu, match=r"a driver for CUDA 13\.0, but no device"):
        diagnose("13.0", False, 13000)
    diagnose("13.0", True, 13010)


def test_old_driver_names_both_versions() -> None:
    with pytest.raises(DriverTooOld, match=r"knows CUDA 12\.4, but torch .* need CUDA 13\.0"):
        diagnose("13.0", False, 12040)


def test_other_compute_capability() -> None:
    """Machine code runs on the same major version, from its own minor version on."""
    check_capability(90, 90, "H200")
    check_capability(80, 86, "A40")
    for built, device in ((90, 100), (90, 80), (89, 86)):
        with pytest.raises(WrongDevice, match=rf"built for sm_{built}, but X is sm_{device}.*--target"):
            check_capability(built, device, "X")


def test_bindings_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    gpu.bindings.cache_clear()
    with pytest.raises(NoGpu, match=r"compilerllm\[cuda\]"):
        gpu.bindings()
    gpu.bindings.cache_clear()


def test_missing_cubin_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(MissingKernel, match=r"linear:gemv .*abc\.cubin"):
        load(Kernel("gemv", "abc", "linear:gemv", ()), tmp_path, FakeApi())


def test_cubin_without_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/abc.cubin").write_bytes(b"code")
    with pytest.raises(MissingKernel, match="has no kernel gemv: CUDA_ERROR_500"):
        load(Kernel("gemv", "abc", "linear:gemv", ()), tmp_path, FakeApi(cuModuleGetFunction=500))


def test_shared_memory_beyond_the_default_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/abc.cubin").write_bytes(b"code")
    for shared, asked in ((48 << 10, False), (100_000, True)):
        api = FakeApi()
        load(Kernel("gemv", "abc", "linear:gemv", (), 4, shared), tmp_path, api)
        assert (("cuFuncSetAttribute", 2, "shared", shared) in api.calls) is asked


def test_kernels_that_cannot_be_launched(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLaunch, match="m:f needs 128 bytes of scratch"):
        load(Kernel("f", "abc", "m:f", ("i32",), scratch=128), tmp_path, FakeApi())
    with pytest.raises(UnsupportedLaunch, match=r"m:f: .*tensordesc"):
        load(Kernel("f", "abc", "m:f", ("tensordesc<bf16[64, 64]>",)), tmp_path, FakeApi())
    with pytest.raises(UnsupportedLaunch, match="m:f needs 233,473 bytes"):
        load(Kernel("f", "abc", "m:f", (), shared=(228 << 10) + 1), tmp_path, FakeApi())


def test_unknown_library() -> None:
    with pytest.raises(ArtifactError, match="'cutlas'"):
        find_maker("cutlas")


def test_errors_tell_lost_contexts_from_others() -> None:
    driver = Driver(FakeApi())
    assert isinstance(driver.error(700, "a step"), KernelFault)
    assert type(driver.error(1, "a step")) is CudaError
    assert "--memory-utilization" in str(driver.error(2, "a step"))
    with pytest.raises(KernelFault, match=r"CUDA_ERROR_719.*context is lost"):
        Driver(FakeApi(cuStreamSynchronize=719)).synchronize(1)


def test_marks_poll_then_wait() -> None:
    api = FakeApi(cuEventQuery=600)
    mark = CudaMark(Driver(api), 7)
    assert not mark.done()
    mark.wait()
    assert api.calls[-1][0] == "cuEventSynchronize"
    api.codes = {"cuEventQuery": 700}
    with pytest.raises(KernelFault, match="a step on the GPU"):
        mark.wait()


def test_out_of_memory_names_bytes_and_flag() -> None:
    assert "weights: 2,048 MiB" in str(out_of_memory("weights", 2 << 30, 1 << 30))
    assert "1,024 MiB are free" in str(out_of_memory("KV cache", 2 << 30, 1 << 30))
    assert "--num-blocks" in str(out_of_memory("KV cache", 2 << 30, 1 << 30))
    assert "--max-num-batched-tokens" in str(out_of_memory("logits", 2 << 30, 1 << 30))
