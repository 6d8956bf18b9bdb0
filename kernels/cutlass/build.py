"""From instances to one shared library: nvcc is asked once an instance, results are kept by content. Build time only."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path

from compilerllm.kernels.cutlass.instances import Instance, table_source
from compilerllm.kernels.errors import BuildFailed

TEMPLATES = Path(__file__).parent / "templates"
# No asserts: CUTLASS's would abort the server, and would put paths of this machine into the library.
FLAGS = (
    "-std=c++17", "-O3", "-DNDEBUG", "-gencode=arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
)  # fmt: skip
LINK_FLAGS = ("-shared", "-cudart=static", "-Xlinker=-s")

Progress = Callable[[int, int, str], None]  # done, all, name of the instance just made


@cache
def compiler() -> tuple[str, str]:
    """Path and version of nvcc: ``CUDACXX``, else on the PATH. Raises ``BuildFailed`` where there is none."""
    wanted = os.environ.get("CUDACXX", "nvcc")
    found = shutil.which(wanted)
    if found is None:
        raise BuildFailed(
            f"CUTLASS kernels are compiled by nvcc, and {wanted!r} is not on the PATH. Install CUDA's nvcc 12.4 or newer, "
            "or set CUDACXX. Models run without these kernels, on Triton and cuBLAS."
        )
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return found, next((line.strip() for line in version.splitlines() if "release" in line), version.strip())


@cache
def headers() -> tuple[tuple[Path, ...], str]:
    """CUTLASS's include folders and version, from the installed package. Raises ``BuildFailed`` where it is missing."""
    spec = importlib.util.find_spec("cutlass_library")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    source = next(
        (s for r in roots if (s := Path(r) / "source").joinpath("include/cutlass/cutlass.h").exists()), None
    )
    if source is None:
        raise BuildFailed(
            "CUTLASS's headers are missing: the package nvidia-cutlass is not installed. pip install 'compilerllm[cutlass]'"
        )
    text = (source / "include/cutlass/version.h").read_text()
    return (source / "include", source / "tools/util/include"), hashlib.sha256(text.encode()).hexdigest()


def object_key(source: str) -> str:
    """What an object depends on: its text, the ABI, flags, compiler, CUTLASS. No path, host or user."""
    digest = hashlib.sha256()
    for part in (source, (TEMPLATES / "abi.h").read_text(), *FLAGS, compiler()[1], headers()[1]):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def library_key(instances: list[Instance]) -> str:
    """Content hash of the library of these instances in this order."""
    digest = hashlib.sha256(" ".join(LINK_FLAGS).encode())
    for source in (table_source(instances), *(i.source() for i in instances)):
        digest.update(object_key(source).encode())
    return digest.hexdigest()[:32]


def build_library(
    instances: list[Instance], cache_dir: Path, progress: Progress | None = None, workers: int | None = None
) -> Path:
    """Compile what is missing, link, and return the library's path in ``cache_dir``.

    progress is called from this thread as instances are done. Raises ``BuildFailed`` with nvcc's first errors.
    """
    library = cache_dir / f"{library_key(instances)}.so"
    if library.exists():
        return library
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".build-") as scratch:
        folder, objects = Path(scratch), {}
        with ThreadPoolExecutor(max_workers=workers or os.cpu_count() or 1) as pool:
            pending = {
                pool.submit(_object, i.name, i.source(), ".cu", folder, cache_dir): i.name for i in instances
            }
            for done, future in enumerate(as_completed(pending), 1):
                try:
                    objects[pending[future]] = future.result()
                except BuildFailed:
                    pool.shutdown(cancel_futures=True)
                    raise
                if progress is not None:
                    progress(done, len(instances), pending[future])
        table = _table(instances, folder)
        linked = folder / "linked.so"
        _run(
            "the library",
            [compiler()[0], *LINK_FLAGS, "-o", str(linked), str(table), *map(str, objects.values())],
        )
        linked.replace(library)  # atomic: a reader sees a whole library or none
    return library


def _table(instances: list[Instance], folder: Path) -> Path:
    """The C ABI, whose functions alone are visible."""
    text, made = folder / "table.cpp", folder / "table.o"
    text.write_text(table_source(instances))
    _run(
        "the table",
        [
            compiler()[0],
            "-std=c++17",
            "-O2",
            "-Xcompiler=-fPIC",
            f"-I{TEMPLATES}",
            "-c",
            str(text),
            "-o",
            str(made),
        ],
    )
    return made


def _object(name: str, source: str, suffix: str, folder: Path, cache_dir: Path) -> Path:
    kept = cache_dir / f"{object_key(source)}.o"
    if kept.exists():
        return kept
    text, made = folder / f"{name}{suffix}", folder / f"{name}.o"
    text.write_text(source)
    includes = [f"-I{path}" for path in (*headers()[0], TEMPLATES)]
    _run(name, [compiler()[0], *FLAGS, *includes, "-c", str(text), "-o", str(made)])
    made.replace(kept)
    return kept


def _run(what: str, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).splitlines()
        errors = [line for line in lines if "error" in line][:6] or lines[:6]
        raise BuildFailed(f"nvcc refused {what} (exit {done.returncode}):\n  " + "\n  ".join(errors))
