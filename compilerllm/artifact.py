"""The artifact on disk: one folder, a manifest that says all, and where finished ones are kept.

``manifest.json`` is written last, so a folder without one is an unfinished build and counts as missing. Folders are
named by key; a build happens in a temporary folder beside them and is renamed into place, so that parallel builders
and a killed one leave whole artifacts only.

An artifact holds nothing of when, where or by whom it was built: equal inputs give equal bytes, and ``id``, the hash of
the manifest with every file's hash in it, is its content address. How long a build took is in a file beside it.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compilerllm.environment import cache_dir
from compilerllm.errors import CompilerLLMError

MANIFEST = "manifest.json"
FORMAT = 2
LOCK = ".lock"  # of the whole cache: shared by builds, exclusive while kernels are collected
_STALE_SECONDS = 24 * 3600
# Files whose hash was found right by this process -> (size, time of change, inode) they had then.
_verified: dict[tuple[Path, str], tuple[int, int, int]] = {}


class ArtifactInvalid(CompilerLLMError):
    """An artifact that is damaged, or made by another version."""


class CacheUnusable(CompilerLLMError):
    """The artifact cache cannot be written."""


def artifact_path(key: str) -> Path:
    """Where the artifact with this key is, or will be."""
    return cache_dir() / "artifacts" / key


def log_path(artifact: Path) -> Path:
    """Where the build's times are: beside the artifact, since they differ from build to build."""
    return artifact.with_name(artifact.name + ".log.json")


def read_log(artifact: Path) -> dict[str, Any]:
    """``seconds`` by stage and ``passes``' seconds of the build that made this artifact here; empty where none is known."""
    try:
        log = json.loads(log_path(artifact).read_text())
    except (OSError, ValueError):  # it came from elsewhere, or somebody cleaned up: nothing depends on it
        return {}
    return log if isinstance(log, dict) else {}


def write_log(artifact: Path, log: Mapping[str, Any]) -> None:
    """Put the build's times beside the artifact; a later build of the same key replaces them."""
    path = log_path(artifact)
    part = path.with_name(f".{artifact.name[:12]}-{os.getpid()}.log")
    with contextlib.suppress(OSError):  # nothing depends on it, so a disk that is full by now is no error
        part.write_text(json.dumps(log, indent=1, sort_keys=True) + "\n")
        part.replace(path)


def read_manifest(folder: Path, verify: bool = True) -> dict[str, Any] | None:
    """The manifest, or None where there is no finished artifact. Raises ``ArtifactInvalid`` for a damaged one.

    verify: also hash every file, each once in a process while it does not change. Sizes are always compared.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        return _read_manifest(folder, path, verify)
    except ArtifactInvalid:
        if not path.exists():  # it was collected while it was read
            return None
        raise


def _read_manifest(folder: Path, path: Path, verify: bool) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactInvalid(f"{path} cannot be read ({error}). {_remedy(folder)}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise ArtifactInvalid(
            f"{path} has format {found}, another than this version's ({FORMAT}). {_remedy(folder)}"
        )
    if manifest.get("id") != manifest_id(manifest):
        raise ArtifactInvalid(f"{path} was changed after it was written. {_remedy(folder)}")
    for name, entry in manifest["files"].items():
        _check_file(folder, name, entry, verify)
    return manifest


def _check_file(folder: Path, name: str, entry: Mapping[str, Any], verify: bool) -> None:
    """Raises ``ArtifactInvalid`` where a file is not what the manifest says."""
    file = folder / name
    try:
        state = file.stat()
        if (
            not file.is_file() or state.st_size != entry["bytes"]
        ):  # a library that breaks off would end the process
            raise ArtifactInvalid(
                f"{file} has {state.st_size} bytes instead of {entry['bytes']}. {_remedy(folder)}"
            )
        seen = state.st_size, state.st_mtime_ns, state.st_ino
        if not verify or _verified.get((file, entry["sha256"])) == seen:
            return
        if file_sha256(file) != entry["sha256"]:
            raise ArtifactInvalid(
                f"{file} does not have the bytes it was written with (its SHA-256 differs). {_remedy(folder)}"
            )
    except FileNotFoundError as error:
        raise ArtifactInvalid(f"{file} is missing. {_remedy(folder)}") from error
    except OSError as error:
        raise ArtifactInvalid(
            f"{file} cannot be read: {error.strerror or error}. {_remedy(folder)}"
        ) from error
    _verified[file, entry["sha256"]] = seen


def _remedy(folder: Path) -> str:
    return f"Delete {folder} to build it again."


def file_sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: Any) -> bytes:
    """One spelling for equal values: what hashes are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def key_digest(fields: Mapping[str, Any]) -> str:
    """The name of a key with these fields: 32 hex digits."""
    return hashlib.sha256(canonical_json(fields)).hexdigest()[:32]


def manifest_id(manifest: Mapping[str, Any]) -> str:
    """The content address: SHA-256, hex, of the manifest without ``id``."""
    return hashlib.sha256(canonical_json({k: v for k, v in manifest.items() if k != "id"})).hexdigest()


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Write the manifest, with size and hash of the files that are there. The last step of a build; gives what was written."""
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST
    }
    whole: dict[str, Any] = json.loads(canonical_json({**manifest, "format": FORMAT, "files": files}))
    whole["id"] = manifest_id(whole)
    (folder / MANIFEST).write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")
    return whole


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
    _sweep(cache_dir() / "libraries")
    with placing(artifact_path(key)) as scratch, (cache_dir() / LOCK).open("ab") as lock:
        with contextlib.suppress(OSError):  # a file system without locks, where nothing is collected either
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield scratch


@contextlib.contextmanager
def placing(target: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``target``, a finished artifact in the cache, when the block ends well.

    Raises ``CacheUnusable`` where the cache cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name[:12]}-"))
        # Whoever may read the cache may read what is in it.
        scratch.chmod(target.parent.stat().st_mode & 0o777)
    except OSError as error:
        raise CacheUnusable(
            f"cannot write the artifact cache {target.parent}: {error.strerror or error}. "
            "Make it writable, or set COMPILERLLM_CACHE_DIR to a folder that is."
        ) from error
    try:
        yield scratch
        if (
            not _put(scratch, target) and not (target / MANIFEST).exists()
        ):  # what is in the way is no artifact
            shutil.rmtree(target, ignore_errors=True)
            if not _put(scratch, target) and not (target / MANIFEST).exists():
                raise OSError(f"{target} is in the way")
    except OSError as error:
        raise CacheUnusable(
            f"cannot write the artifact in {target.parent}: {error.strerror or error}. Free space, or set COMPILERLLM_CACHE_DIR."
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _put(scratch: Path, target: Path) -> bool:
    """Rename into place; False where another builder was first, whose artifact is as good."""
    try:
        scratch.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def _sweep(folder: Path) -> None:
    """Remove what builds that were killed left, which is what is older than any build takes."""
    for left in folder.glob(".*-*"):
        with contextlib.suppress(OSError):  # somebody else was faster
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
