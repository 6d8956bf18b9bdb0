"""The artifact on disk: one folder, a manifest that says all, and where finished ones are kept.

``manifest.json`` is written last, so a folder without one is an unfinished build and counts as missing. Folders are
named by key; a build happens in a temporary folder beside them and is renamed into place, so that parallel builders
and a killed one leave whole artifacts only.
"""

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compilerllm.environment import cache_dir
from compilerllm.errors import CompilerLLMError

MANIFEST = "manifest.json"
FORMAT = 1
_STALE_SECONDS = 24 * 3600


class ArtifactInvalid(CompilerLLMError):
    """An artifact that is damaged, or made by another version."""


class CacheUnusable(CompilerLLMError):
    """The artifact cache cannot be written."""


def artifact_path(key: str) -> Path:
    """Where the artifact with this key is, or will be."""
    return cache_dir() / "artifacts" / key


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, or None where there is no finished artifact. Raises ``ArtifactInvalid`` for a damaged one."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ArtifactInvalid(
            f"{path} cannot be read ({error}). Delete {folder} to build it again."
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ArtifactInvalid(
            f"{path} has another format than this version's ({FORMAT}). Delete {folder} to build it again."
        )
    for name, size in manifest.get("files", {}).items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:  # a library that breaks off would end the process at its first call
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise ArtifactInvalid(f"{file} {state}. Delete {folder} to build it again.")
    return manifest


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest, with the sizes of the files that are there. The last step of a build."""
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    text = json.dumps({**manifest, "format": FORMAT, "files": files}, indent=1, sort_keys=True)
    (folder / MANIFEST).write_text(text)


def opaque_line(manifest: Mapping[str, Any]) -> str:
    """How torch operators without a kernel of ours run, for a card: empty where the model has none."""
    entries: list[dict[str, Any]] = manifest.get("opaque") or []
    if not entries:
        return ""
    operators = sum(len(e["operators"]) for e in entries)
    compiled = sum(e["runs"] == "inductor" for e in entries)
    said = f"{operators} torch operators in {len(entries)} calls of the host, {compiled} compiled by Inductor"
    reasons = dict.fromkeys(f"{e['where']}: {e['reason']}" for e in entries if e["reason"])
    return "; not compiled: ".join((said, *reasons))


def cutlass_line(manifest: Mapping[str, Any]) -> str:
    """The CUTLASS kernels that a program calls, or why there are none, for a card: empty where they were not asked for."""
    entry: dict[str, Any] = manifest.get("cutlass") or {}
    if entry.get("left_out"):
        return f"candidates left out: {entry['left_out']}"
    return ", ".join(entry.get("instances", ()))


@contextlib.contextmanager
def building(key: str) -> Iterator[Path]:
    """A temporary folder that becomes the artifact when the block ends well.

    Raises ``CacheUnusable`` where the cache cannot be written.
    """
    target = artifact_path(key)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        _sweep(cache_dir() / "libraries")
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{key[:12]}-"))
    except OSError as error:
        raise CacheUnusable(
            f"cannot write the artifact cache {target.parent}: {error.strerror or error}. "
            "Make it writable, or set COMPILERLLM_CACHE_DIR to a folder that is."
        ) from error
    try:
        yield scratch
        if not target.exists():
            with contextlib.suppress(OSError):  # another builder may have been first: its artifact is as good
                scratch.rename(target)
        if not (target / MANIFEST).exists():
            shutil.rmtree(target, ignore_errors=True)
            scratch.rename(target)
    except OSError as error:
        raise CacheUnusable(
            f"cannot write the artifact in {target.parent}: {error.strerror or error}. Free space, or set COMPILERLLM_CACHE_DIR."
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what builds that were killed left, which is what is older than any build takes."""
    for left in folder.glob(".*-*"):
        with contextlib.suppress(OSError):  # somebody else was faster
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
