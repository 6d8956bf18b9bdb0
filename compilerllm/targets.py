"""From the device a user names to the target that is compiled for."""

from compilerllm.errors import CompilerLLMError


class NoDevice(CompilerLLMError):
    """A device that this machine does not have, or that no target fits."""


def target_name(device: str) -> str:
    """``cpu``, or the CUDA target of the first GPU ("sm_90"), for ``auto``, ``cpu`` or ``cuda``. Raises ``NoDevice``."""
    if device == "cpu":
        return "cpu"
    from compilerllm.kernels.launch.gpu.probe import find_gpu

    gpu = find_gpu()
    if gpu is None:
        if device == "auto":
            return "cpu"
        raise NoDevice(
            "--device cuda, but the CUDA driver finds no GPU. Check nvidia-smi, or serve with --device cpu."
        )
    for capability in (100, 90, 89, 80):
        if gpu.capability >= capability and gpu.capability // 10 == capability // 10:
            return f"sm_{capability}"
    if device == "auto":
        return "cpu"
    raise NoDevice(
        f"{gpu.name} has compute capability {gpu.capability / 10:.1f}; kernels are built for 8.0, 8.9, 9.0 and 10.0. "
        "Serve with --device cpu."
    )


def is_cuda(target: str) -> bool:
    """Whether a target's name is a CUDA one."""
    return target.startswith("sm_")
