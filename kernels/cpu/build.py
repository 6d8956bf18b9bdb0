"""From C++ text to a shared library: the compiler is asked for once a source, results are kept by content.

Build time only; a warm server never comes here.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from compilerllm.kernels.cpu.target import CpuTarget, find_target
from compilerllm.kernels.errors import BuildFailed
from compilerllm.kernels.kept import is_whole, keep
from compilerllm.kernels.spec import KernelSpec

SOURCE_DIR = Path(__file__).parent / "csrc"


@cache
def compiler() -> tuple[tuple[str, ...], str]:
    """The C++ compiler's command and its version line. ``CXX`` may hold a command with arguments, such as ``ccache g++``.

    Raises ``BuildFailed`` where there is none.
    """
    wanted = shlex.split(os.environ.get("CXX", ""))
    candidates = [wanted] if wanted else [["g++"], ["c++"], ["clang++"]]
    found = next((c for c in candidates if shutil.which(c[0])), None)
    if found is None and wanted:
        raise BuildFailed(
            f"CXX names {wanted[0]!r}, which is no program on the PATH. Unset it, or set it to g++ 11 or newer"
        )
    if found is None:
        raise BuildFailed("no C++ compiler: g++ is not on the PATH. Install g++ 11 or newer, or set CXX")
    version = subprocess.run([*found, "--version"], capture_output=True, text=True, check=False)
    return tuple(found), version.stdout.splitlines()[0] if version.stdout else found[0]


@cache
def templates_hash() -> str:
    """Hash of every template source: a changed header is another kernel."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE_DIR.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def library_key(sources: list[str], target: CpuTarget) -> str:
    """What a library depends on: sources, templates, flags, compiler. No path, host or user."""
    digest = hashlib.sha256()
    for part in (*sources, templates_hash(), *target.compile_flags, compiler()[1]):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def kernel_key(spec: KernelSpec) -> str:
    """The spec's key with everything its machine code is made from."""
    return spec.key(templates_hash(), *find_target(spec.target).compile_flags, compiler()[1])


def build_library(source: str, target: CpuTarget, cache_dir: Path) -> Path:
    """Compile a program with the runtime into ``cache_dir``; the path of the library, made only where it is missing.

    Raises ``BuildFailed`` with the compiler's first errors.
    """
    runtime = (SOURCE_DIR / "runtime.cpp").read_text()
    sampler = (SOURCE_DIR / "sampler.cpp").read_text()
    sources = {"program": source, "runtime": runtime, "sampler": sampler}
    library = cache_dir / f"{library_key(list(sources.values()), target)}.so"
    if is_whole(library):
        return library
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".build-") as scratch:
        folder = Path(scratch)
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            objects = list(
                pool.map(lambda item: _compile(item[0], item[1], target, folder, cache_dir), sources.items())
            )
        linked = folder / "linked.so"
        _run([*compiler()[0], "-shared", "-pthread", "-o", str(linked), *map(str, objects)])
        keep(linked, library)
    return library


def _compile(name: str, source: str, target: CpuTarget, folder: Path, cache_dir: Path) -> Path:
    """One object file; the runtime's are shared by all programs of a target."""
    shared = cache_dir / f"{library_key([source], target)}.o" if name != "program" else folder / "program.o"
    if is_whole(shared):
        return shared
    text, made = folder / f"{name}.cpp", folder / f"{name}.o"
    text.write_text(source)
    _run(
        [
            *compiler()[0],
            *target.compile_flags,
            f"-ffile-prefix-map={folder}=.",
            f"-I{SOURCE_DIR}",
            "-c",
            str(text),
            "-o",
            str(made),
        ]
    )
    if made != shared:
        keep(made, shared)
    return shared


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line][
            :8
        ] or done.stderr.splitlines()[:8]
        raise BuildFailed(
            f"{Path(command[0]).name} refused generated code (exit {done.returncode}):\n  "
            + "\n  ".join(errors)
        )
