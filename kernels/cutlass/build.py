"""From instances to one shared library: nvcc is asked once an instance, results are kept by content. Build time only.

The cache folder holds objects, libraries, and beside each library what it is made of; where nvcc or the headers are
missing, a library of the cache that was made elsewhere does too.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

from compilerllm.kernels.cutlass.instances import Instance, of_config, table_source
from compilerllm.kernels.cutlass.supply import Supply
from compilerllm.kernels.errors import BuildFailed, UnsupportedByTarget
from compilerllm.kernels.kept import is_whole, keep

TEMPLATES = Path(__file__).parent / "templates"
# No asserts: CUTLASS's would abort the server, and would put paths of this machine into the library.
FLAGS = (
    "-std=c++17", "-O3", "-DNDEBUG", "-DCUTLASS_ENABLE_GDC_FOR_SM90=1", "-gencode=arch=compute_90a,code=sm_90a",
    "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden",
)  # fmt: skip
# Nothing is linked on the device: that would record the folders of this CUDA.
LINK_FLAGS = ("-shared", "-cudart=static", "-Xlinker=-s", "-nodlink")

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


def _hash(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def text_key(source: str) -> str:
    """What of an object is ours: its text, the ABI, flags."""
    return _hash(source, (TEMPLATES / "abi.h").read_text(), *FLAGS)


def object_key(source: str) -> str:
    """What an object depends on: that, the compiler, CUTLASS. No path, host or user."""
    return _hash(source, (TEMPLATES / "abi.h").read_text(), *FLAGS, compiler()[1], headers()[1])


def library_key(instances: list[Instance]) -> str:
    """Content hash of the library of these instances in this order."""
    digest = hashlib.sha256(" ".join(LINK_FLAGS).encode())
    for source in (table_source(instances), *(i.source() for i in instances)):
        digest.update(object_key(source).encode())
    return digest.hexdigest()[:32]


def find_supply(cache_dir: Path) -> Supply:
    """What can be had here: any instance with nvcc and the headers, else those of the cache's richest library."""
    try:
        compiler(), headers()
    except BuildFailed as error:
        kept = max((_current(f) for f in _described(cache_dir)), key=len, default=frozenset[str]())
        return Supply(False, kept, str(error))
    return Supply(True)


def provide_library(instances: list[Instance], cache_dir: Path, progress: Progress | None = None) -> Path:
    """A library in ``cache_dir`` with these instances, and maybe others: built, or found where nothing can be built.

    Raises ``BuildFailed`` where there is none.
    """
    supply = find_supply(cache_dir)
    if supply.builds:
        return build_library(instances, cache_dir, progress)
    wanted = {i.name for i in instances}
    for described in _described(cache_dir):
        if wanted <= _current(described) and is_whole(described.with_suffix(".so")):
            return described.with_suffix(".so")
    raise BuildFailed(
        f"no library in {cache_dir} has {', '.join(sorted(wanted - supply.kept))}: {supply.reason}"
    )


def describe(library: Path) -> dict[str, Any]:
    """Of a library in the cache: ``instances`` (config, ``text_key``) and ``tools``, the versions that made it."""
    described: dict[str, Any] = json.loads(library.with_suffix(".json").read_text())
    return described


def _described(cache_dir: Path) -> list[Path]:
    """Descriptions of the libraries in the cache, the latest first."""
    found = [f for f in cache_dir.glob("*.json") if f.with_suffix(".so").exists()]
    return sorted(found, key=lambda f: (-f.stat().st_mtime, f.name))


def _current(described: Path) -> frozenset[str]:
    """Names of the instances that the library has as this version would build them."""
    current = []
    for entry in describe(described)["instances"]:
        try:
            instance = of_config(entry["config"])
        except UnsupportedByTarget:  # another version's
            continue
        if entry["text"] == text_key(instance.source()):
            current.append(instance.name)
    return frozenset(current)


def build_library(
    instances: list[Instance], cache_dir: Path, progress: Progress | None = None, workers: int | None = None
) -> Path:
    """Compile what is missing, link, and return the library's path in ``cache_dir``.

    progress is called from this thread as instances are done. Raises ``BuildFailed`` with nvcc's first errors.
    """
    cache_dir = cache_dir.resolve()  # compilers run in a folder of their own
    library = cache_dir / f"{library_key(instances)}.so"
    if library.with_suffix(".json").exists() and is_whole(library):
        return library
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".build-") as scratch:
        folder, objects = Path(scratch), {}
        with ThreadPoolExecutor(max_workers=workers or len(os.sched_getaffinity(0))) as pool:
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
        table, linked, described = _table(instances, folder), folder / "linked.so", folder / "described.json"
        ordered = [str(objects[i.name]) for i in instances]
        _run("the library", [compiler()[0], *LINK_FLAGS, "-o", linked.name, table.name, *ordered], folder)
        tools = {"nvcc": compiler()[1], "cutlass": headers()[1]}
        made = [{"config": i.config(), "text": text_key(i.source())} for i in instances]
        described.write_text(json.dumps({"instances": made, "tools": tools}, indent=1) + "\n")
        keep(linked, library)
        described.replace(library.with_suffix(".json"))
    return library


def _table(instances: list[Instance], folder: Path) -> Path:
    """The C ABI, whose functions alone are visible."""
    text, made = folder / "table.cpp", folder / "table.o"
    text.write_text(table_source(instances))
    flags = ("-std=c++17", "-O2", "-Xcompiler=-fPIC", f"-I{TEMPLATES}")
    _run("the table", [compiler()[0], *flags, "-c", text.name, "-o", made.name], folder)
    return made


def _object(name: str, source: str, suffix: str, folder: Path, cache_dir: Path) -> Path:
    kept = cache_dir / f"{object_key(source)}.o"
    if is_whole(kept):
        return kept
    made = folder / f"{name}.o"
    # Headers' folders under names of no machine: with the source's place, equal sources give equal libraries anywhere.
    places = [f(path) for path in (*headers()[0], TEMPLATES) for f in (_include, _renamed)]
    with _place_of(object_key(source), folder) as place:
        text = place / f"{name}{suffix}"
        text.write_text(source)
        _run(name, [compiler()[0], *FLAGS, *places, "-c", text.name, "-o", str(made)], place)
    keep(made, kept)
    return kept


@contextlib.contextmanager
def _place_of(key: str, otherwise: Path) -> Iterator[Path]:
    """A folder whose path depends on the source alone: nvcc hashes a source's path into names that stay in the library.

    One build at a time is in it. ``otherwise``, where the path is somebody else's: then only those names differ.
    """
    place = Path(tempfile.gettempdir()) / f"compilerllm-{key}"
    while True:
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o700)
        try:
            handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # the build before has just cleaned up
            continue
        except OSError:
            yield otherwise
            return
        try:
            if os.fstat(handle).st_uid != os.getuid():
                yield otherwise
                return
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not (place.exists() and os.path.samestat(os.fstat(handle), place.stat())):
                continue
            try:
                yield place
            finally:
                shutil.rmtree(place, ignore_errors=True)
            return
        finally:
            os.close(handle)


def _include(path: Path) -> str:
    return f"-I{path}"


def _renamed(path: Path) -> str:
    return f"-Xcompiler=-ffile-prefix-map={path}={path.name}"


def _run(what: str, command: list[str], folder: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).splitlines()
        errors = [line for line in lines if "error" in line][:6] or lines[:6]
        raise BuildFailed(f"nvcc refused {what} (exit {done.returncode}):\n  " + "\n  ".join(errors))
