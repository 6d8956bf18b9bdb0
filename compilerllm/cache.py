"""The artifact cache as a store: what is in it, what is in use, why a key misses, and how room is made.

A process that uses an artifact holds a shared lock on its manifest, and a build one on the cache; collecting takes them
exclusively, and leaves alone what it does not get. Locks end with their process, however it ends.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compilerllm.artifact import (
    LOCK,
    MANIFEST,
    ArtifactInvalid,
    CacheUnusable,
    artifact_path,
    key_digest,
    log_path,
    read_log,
    read_manifest,
)
from compilerllm.description import differing
from compilerllm.environment import cache_dir
from compilerllm.errors import CompilerLLMError

_RESTING = (
    3600  # seconds for which a kernel that no artifact has is kept: whoever compiled it may not be done
)
_REMOVED = ".removed-"
_held: dict[Path, int] = {}
_log = logging.getLogger(__name__)


class UnknownKey(CompilerLLMError):
    """A name that no artifact of the cache has."""


@dataclass(frozen=True)
class Entry:
    """An artifact of the cache. built, used: seconds since the epoch; bytes: of all its files."""

    path: Path
    manifest: Mapping[str, Any]
    model: str
    bytes: int
    built: float
    used: float

    @property
    def key(self) -> str:
        return self.path.name

    @property
    def fields(self) -> Mapping[str, Any]:
        """What its key is made of."""
        fields: Mapping[str, Any] = self.manifest["key"]["fields"]
        return fields


def list_entries() -> tuple[list[Entry], dict[Path, ArtifactInvalid]]:
    """Finished artifacts of this format, the last used first; and what is wrong with others. Files are not hashed."""
    found, damaged = [], {}
    for path in _folders(artifact_path("any").parent):
        try:
            manifest = read_manifest(path, verify=False)
            if manifest is None:
                continue
            check_key(path, manifest)
            found.append(_entry(path, manifest))
        except ArtifactInvalid as error:
            damaged[path] = error
        except FileNotFoundError:  # somebody collected it meanwhile
            continue
    return sorted(found, key=lambda e: (-e.used, e.key)), damaged


def _entry(path: Path, manifest: Mapping[str, Any]) -> Entry:
    size = sum(f["bytes"] for f in manifest["files"].values()) + (path / MANIFEST).stat().st_size
    name = read_log(path).get("model") or manifest.get("facts", {}).get("architecture", "")
    return Entry(
        path, manifest, str(name), size, (path / MANIFEST).stat().st_mtime, path.stat().st_mtime
    )  # a folder's time is when it was used last: see ``hold``


def _folders(root: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    return []


def find_entry(name: str) -> Entry:
    """The artifact whose key begins with ``name``. Raises ``UnknownKey``."""
    found = [e for e in list_entries()[0] if e.key.startswith(name)] if name else []
    if len(found) != 1:
        said = f"{len(found)} artifacts begin with" if found else "no artifact of the cache has"
        raise UnknownKey(f"{said} the key {name!r}. `compilerllm cache ls` shows those there are.")
    return found[0]


def check_key(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raise ``ArtifactInvalid`` where an artifact does not lie under the key that its fields give."""
    digest = key_digest(manifest["key"]["fields"])
    if not digest == manifest["key"]["digest"] == path.name:
        raise ArtifactInvalid(
            f"{path} holds the artifact of another key, {digest}. Delete {path} to build it again."
        )


def is_usable(path: Path) -> bool:
    """Whether the cache has the artifact whose place this is; it is held from then on, until this process ends.

    Raises ``ArtifactInvalid`` where it is damaged.
    """
    manifest = read_manifest(path)
    if manifest is None:
        return False
    check_key(path, manifest)
    return hold(path)


def hold(path: Path) -> bool:
    """Keep an artifact from being collected while this process lives, and note its use; False where it is gone.

    Works in a cache that cannot be written too, where nothing is noted.
    """
    try:
        handle = os.open(path / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    if path in _held and os.path.sameopenfile(handle, _held[path]):
        os.close(handle)
    else:
        with contextlib.suppress(
            OSError
        ):  # a file system without locks: nobody can collect there safely either
            fcntl.flock(handle, fcntl.LOCK_SH)
        if not (path / MANIFEST).exists():  # collected while this waited
            os.close(handle)
            return False
        _held[path] = handle
    with contextlib.suppress(OSError):
        os.utime(path)
    return True


def discard(path: Path) -> None:
    """Take a damaged artifact out of the cache. Raises ``CacheUnusable`` where it cannot be."""
    try:
        _remove(path)
    except OSError as error:
        raise CacheUnusable(
            f"{path} is damaged, and cannot be removed: {error.strerror or error}. Make the cache writable, or set "
            "COMPILERLLM_CACHE_DIR."
        ) from error


def _remove(path: Path) -> None:
    """Out of sight in one step, then file by file."""
    aside = path.with_name(f"{_REMOVED}{uuid.uuid4().hex[:12]}")
    try:
        path.rename(aside)
    except FileNotFoundError:  # somebody else was faster
        return
    shutil.rmtree(aside, ignore_errors=True)
    log_path(path).unlink(missing_ok=True)


# Misses


def explain_miss(fields: Mapping[str, Any]) -> str:
    """Why the cache has no artifact of these key fields: where the nearest one differs."""
    near = nearest(fields)
    if near is None:
        return "the cache has nothing like it"
    entry, differences = near
    return f"the nearest, {entry.key[:12]} ({entry.model}), differs in {describe_differences(differences)}"


def nearest(fields: Mapping[str, Any]) -> tuple[Entry, list[tuple[str, Any, Any]]] | None:
    """The artifact with the fewest other fields, one of the same model and target before others; None where none is near."""
    ranked = []
    for entry in list_entries()[0]:
        found = differing(entry.fields, fields)
        names = {n for n, _, _ in found}
        other_model = any(n.startswith("model.") for n in names)
        ranked.append((other_model + ("target" in names), len(found), -entry.used, entry, found))
    if not ranked:
        return None
    far, _, _, entry, found = min(ranked, key=lambda r: r[:3])
    return None if far == 2 else (entry, found)


def describe_differences(differences: list[tuple[str, Any, Any]], most: int = 6) -> str:
    """``dtype (float32, now bfloat16), tools.torch (2.12.0, now 2.13.0)``."""
    said = [f"{name} ({short(old)}, now {short(new)})" for name, old, new in differences[:most]]
    rest = len(differences) - most
    return ", ".join(said) + (f" and {rest} more" if rest > 0 else "") if said else "nothing"


def short(value: Any) -> str:
    """A field's value in a table: hashes by their beginning, ``-`` for one that is not there."""
    text = "-" if value is None else str(value)
    return text if len(text) <= 48 else text[:12] + "..."


# Making room


@dataclass
class Collected:
    """What ``collect`` removed (or would): names and bytes by kind; in_use: artifacts left because somebody has them open."""

    artifacts: list[Entry]
    damaged: list[str]
    in_use: list[Entry]
    orphans: list[Path]
    bytes: int
    building: bool  # a build is running, so that kernels without an artifact were left alone


def collect(
    max_bytes: int | None = None, older_than: float | None = None, dry_run: bool = False
) -> Collected:
    """Remove artifacts unused for ``older_than`` seconds, then the longest unused until all take ``max_bytes``; damaged ones,
    what killed builds left, and kernels and libraries that no artifact has any more.

    Raises ``CacheUnusable``.
    """
    entries, invalid = list_entries()
    done = Collected([], [str(e) for e in invalid.values()], [], [], 0, False)
    now, total, leaving = time.time(), sum(e.bytes for e in entries), []
    for entry in reversed(entries):
        old = older_than is not None and now - entry.used > older_than
        if old or (max_bytes is not None and total > max_bytes):
            leaving.append(entry)
            total -= entry.bytes
    try:
        for entry in leaving:
            if _collect_one(entry, dry_run):
                done.artifacts.append(entry)
                done.bytes += entry.bytes
            else:
                done.in_use.append(entry)
        if not dry_run:
            for path in invalid:
                _remove(path)
        kept = [e for e in entries if e not in done.artifacts]
        with _alone() as alone:
            done.building = not alone
            for path in _orphans(kept, now, everything=alone):
                done.bytes += _size(path)
                done.orphans.append(path)
                if not dry_run:
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    except OSError as error:
        raise CacheUnusable(f"cannot collect {cache_dir()}: {error.strerror or error}.") from error
    return done


def _collect_one(entry: Entry, dry_run: bool) -> bool:
    with _unused(entry.path) as unused:
        if unused and not dry_run:
            _remove(entry.path)
    return unused


@contextlib.contextmanager
def _unused(path: Path) -> Iterator[bool]:
    """Whether no process holds the artifact; none can get hold of it within the block then."""
    try:
        handle = os.open(path / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(handle)


@contextlib.contextmanager
def _alone() -> Iterator[bool]:
    """Whether no build runs; none begins to write within the block then."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / LOCK).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _orphans(kept: list[Entry], now: float, everything: bool) -> list[Path]:
    """What nobody needs: kernels and libraries by content, scratch of builds that were killed. Only where none runs."""
    if not everything:
        return []
    names = {Path(n).name.partition(".")[0] for e in kept for n in e.manifest["files"]}
    contents = {f["sha256"] for e in kept for f in e.manifest["files"].values()}
    root = cache_dir()
    found = [p for p in (root / "artifacts").glob(".*") if p.is_dir() or p.suffix == ".log"]
    found += [p for p in (root / "artifacts").glob("*.log.json") if not artifact_of_log(p).exists()]
    found += [p for folder in ("libraries", "kernels", "unpacked") for p in (root / folder).rglob(".*")]
    kernels = [p for p in (root / "kernels").glob("*/*") if p.is_file() and p.parent.name != "cutlass"]
    found += [p for p in kernels if p.name.partition(".")[0] not in names]
    for path in _folders(root / "unpacked"):  # of packed files: they can be unpacked again
        with _unused(path) as unused:
            found += [path] if unused else []
    for folder in (root / "libraries", root / "kernels" / "cutlass"):
        found += _unused_libraries(folder, names, contents)
    return sorted(p for p in dict.fromkeys(found) if _is_older(p, now - _RESTING))


def _is_older(path: Path, than: float) -> bool:
    try:
        return path.stat().st_mtime < than
    except FileNotFoundError:  # written and moved into place meanwhile
        return False


def _unused_libraries(folder: Path, names: set[str], contents: set[str]) -> list[Path]:
    """Libraries that no artifact has a copy of, with what describes them; objects, once no library is left."""
    made = [p for p in folder.glob("*") if p.suffix in (".so", ".pt2")]
    unused = [p for p in made if p.stem not in names and _kept_hash(p) not in contents]
    stems = {p.stem for p in unused}
    more = [p for p in folder.glob("*") if p.name.partition(".")[0] in stems]
    if len(unused) == len(made):
        more += [p for p in folder.glob("*") if ".o" in p.suffixes]
    return more


def _kept_hash(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.with_name(path.name + ".sha256").read_text()
    return ""


def artifact_of_log(log: Path) -> Path:
    """The artifact that a log beside it is of."""
    return log.with_name(log.name.removesuffix(".log.json"))


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    return path.stat().st_size
