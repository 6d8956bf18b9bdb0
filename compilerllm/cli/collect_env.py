"""Print what a bug report needs: versions, processor, memory, compiler, accelerators, cache. Nothing is sent anywhere."""

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "msgspec", "pyzmq", "fastapi",
             "uvicorn", "uvloop", "jinja2", "sympy", "triton", "cuda-bindings", "nvidia-cutlass")  # fmt: skip
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # it has no flags of its own


def run(args: argparse.Namespace) -> int:
    from compilerllm import __version__
    from compilerllm.cli.terminal import print_card
    from compilerllm.environment import cache_dir

    del args
    model, flags = _cpu()
    card = {
        "compilerllm": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": model,
        "instructions": " ".join(flags) or "none of those that kernels use",
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "compiler": _compiler(),
        "GPU": _gpu(),
        "nvidia-smi": _first_line(
            "nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"
        ),
        "cache": _cache(cache_dir()),
    }
    card.update({name: _version(name) for name in _PACKAGES})
    card.update(
        {name: value for name, value in sorted(os.environ.items()) if name.startswith("COMPILERLLM_")}
    )
    print_card(card)
    return 0


def _cpu() -> tuple[str, list[str]]:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or "unknown", []
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    named = {name.strip(): value.strip() for name, value in fields.items()}
    has = named.get("flags", "").split()
    return named.get("model name", "unknown"), [flag for flag in _CPU_FLAGS if flag in has]


def _gpu() -> str:
    """What the CUDA driver says of the first device."""
    from compilerllm.kernels.launch.gpu.probe import find_gpu

    gpu = find_gpu()
    if gpu is None:
        return "the CUDA driver finds none"
    version = f"{gpu.driver // 1000}.{gpu.driver % 1000 // 10}"
    return f"{gpu.name}, compute capability {gpu.capability / 10:.1f}, {gpu.memory / 2**30:.1f} GiB, driver for CUDA {version}"


def _compiler() -> str:
    from compilerllm.kernels.cpu.build import compiler
    from compilerllm.kernels.errors import BuildFailed

    try:
        command, version = compiler()
    except BuildFailed as error:
        return str(error)
    return f"{version} ({' '.join(command)})"


def _first_line(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return f"no {command[0]}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    lines = (done.stdout or done.stderr).splitlines()
    return lines[0] if lines else f"{command[0]} says nothing (exit status {done.returncode})"


def _cache(folder: Path) -> str:
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) if folder.is_dir() else 0
    return f"{folder}, {size / 2**20:.0f} MiB"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
