"""Bundles: artifacts of one model for several targets in one folder or one packed file, and how any of them is opened.

A bundle is ``bundle.json`` and a folder for each artifact, called by its target; what a cache exports is one too, its
artifacts called by their keys. Packed, it is a zip of stored files (``.cllm``) whose bytes depend on the artifacts alone.
Whatever is opened is verified by hash first; nothing in it is ever unpickled.
"""

import hashlib
import json
import logging
import shutil
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from compilerllm import __version__
from compilerllm.artifact import (
    MANIFEST,
    ArtifactInvalid,
    artifact_path,
    canonical_json,
    placing,
    read_manifest,
)
from compilerllm.cache import check_key, discard, hold
from compilerllm.environment import cache_dir
from compilerllm.kernels.launch.machine import host_features
from compilerllm.targets import is_cuda, target_name

BUNDLE = "bundle.json"
BUNDLE_FORMAT = 1
SUFFIX = ".cllm"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can say
# What reading a damaged zip raises; RuntimeError is for parts that claim to be encrypted, or compressed oddly.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    OverflowError,
)
_log = logging.getLogger(__name__)


class WrongTarget(ArtifactInvalid):
    """An artifact or bundle that holds none for the machine that is to run it."""


def is_artifact(place: Path) -> bool:
    """Whether a path is something that ``open_artifact`` opens, rather than a model."""
    if place.is_dir():
        return (place / MANIFEST).is_file() or (place / BUNDLE).is_file()
    return place.is_file() and place.suffix == SUFFIX


def open_artifact(path: Path, target: str | None = None, *, to_run: bool = True) -> Path:
    """The folder of the artifact in ``path``: one itself, a bundle, or a packed file (which is unpacked into the cache).

    target: which of a bundle's; by default the one for this machine, or the only one where it is not ``to_run``. Raises ``ArtifactInvalid`` for what is damaged, of
    another version, or no artifact; ``WrongTarget``; ``CacheUnusable`` where a packed file cannot be unpacked.
    """
    path = path.expanduser()
    if (path / MANIFEST).is_file():
        return _open_folder(path, target)
    if (path / BUNDLE).is_file():
        return _open_bundle(path, target, to_run)
    if path.is_file():
        return _open_packed(path, target, to_run)
    raise ArtifactInvalid(
        f"{path} {'has neither manifest.json nor bundle.json' if path.is_dir() else 'does not exist'}. Give an artifact, "
        f"the folder that `compilerllm build --output` made, or a packed {SUFFIX} file."
    )


def _open_folder(folder: Path, target: str | None) -> Path:
    manifest = _checked(folder)
    if target not in (None, manifest["target"]) and not (target == "cpu" and not is_cuda(manifest["target"])):
        raise WrongTarget(f"{folder} is built for {manifest['target']}, not for {target}.")
    hold(folder)
    return folder


def _open_bundle(folder: Path, target: str | None, to_run: bool) -> Path:
    entries = read_bundle(folder)
    chosen = choose(folder, entries, target, to_run=to_run)
    if _checked(folder / chosen)["id"] != entries[chosen]["id"]:
        raise ArtifactInvalid(
            f"{folder / chosen} is not the artifact that {folder / BUNDLE} names; build the bundle again."
        )
    hold(folder / chosen)
    return folder / chosen


def _open_packed(file: Path, target: str | None, to_run: bool) -> Path:
    with _open_zip(file) as packed:
        entries = _entries(_member(packed, BUNDLE), file)
        chosen = choose(file, entries, target, to_run=to_run)
        place = cache_dir() / "unpacked" / str(entries[chosen]["id"])
        _provide(packed, chosen, str(entries[chosen]["id"]), place)
    _checked(place)
    return place


def _provide(packed: zipfile.ZipFile, name: str, wanted: str, place: Path) -> bool:
    """The artifact ``name`` at ``place`` in the cache, held; whether it had to be unpacked."""
    try:
        if _is(place, wanted) and hold(place):
            return False
    except ArtifactInvalid as error:
        _log.warning("%s is unpacked again: %s", place, error)
        discard(place)
    with placing(place) as folder:
        _extract(packed, name, folder)
        if not _is(folder, wanted):
            raise ArtifactInvalid(f"{packed.filename} is damaged: {name} in it is not what it says.")
    hold(place)
    return True


def _is(folder: Path, wanted: str) -> bool:
    manifest = read_manifest(folder)
    return manifest is not None and manifest["id"] == wanted


def _checked(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    if manifest is None:
        raise ArtifactInvalid(f"{folder} holds no finished artifact.")
    if manifest["version"] != __version__:
        raise ArtifactInvalid(
            f"{folder} is built by version {manifest['version']}, and this is {__version__}. Build it again, or install that version."
        )
    return manifest


def choose(
    place: Path, entries: Mapping[str, Mapping[str, Any]], asked: str | None, *, to_run: bool = True
) -> str:
    """Name of the artifact for a target: the one asked for, else this GPU's, else the CPU's that uses most of this processor;
    the only one, where it need not run here.

    Raises ``WrongTarget`` with what there is, and where there are several.
    """
    if asked is None and not to_run and len(entries) == 1:
        return next(iter(entries))
    here = target_name("auto") if asked is None else asked
    features = {entry["target"]: entry["features"] for entry in entries.values()}
    if here == "cpu":
        own = host_features()
        fitting = [t for t, needed in features.items() if not is_cuda(t) and set(needed) <= own]
        here = max(fitting, key=lambda t: (len(features[t]), t), default=here)
    found = [name for name, entry in entries.items() if entry["target"] == here]
    if len(found) == 1:
        return found[0]
    wanted = f"for {asked}" if asked is not None else f"that runs here ({here})"
    if found:
        raise WrongTarget(
            f"{place} has {len(found)} artifacts {wanted}; `compilerllm cache import` takes them all."
        )
    raise WrongTarget(f"{place} has no artifact {wanted}; it has {', '.join(sorted(features))}.")


# Writing


def read_bundle(folder: Path) -> dict[str, dict[str, Any]]:
    """By name, what ``bundle.json`` says: ``target``, ``id``, ``key``, ``level``, ``bytes``, ``features``.

    Raises ``ArtifactInvalid``.
    """
    path = folder / BUNDLE
    try:
        return _entries(path.read_bytes(), path)
    except OSError as error:
        raise ArtifactInvalid(f"{path} cannot be read: {error.strerror or error}.") from error


def _entries(text: bytes, place: Path) -> dict[str, dict[str, Any]]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ArtifactInvalid(
            f"{place}: {BUNDLE} does not parse ({error}); build the bundle again."
        ) from error
    if not isinstance(data, dict) or data.get("format") != BUNDLE_FORMAT:
        raise ArtifactInvalid(
            f"{place} is a bundle of another format than this version's ({BUNDLE_FORMAT}); build it again."
        )
    if data.get("id") != _bundle_id(data):
        raise ArtifactInvalid(f"{place} was changed after it was written; build the bundle again.")
    entries: dict[str, dict[str, Any]] = data["artifacts"]
    return entries


def _bundle_id(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json({k: v for k, v in data.items() if k != "id"})).hexdigest()


def bundle_text(artifacts: Mapping[str, Path]) -> str:
    """``bundle.json`` for these artifacts, by name. Raises ``ArtifactInvalid``."""
    entries = {}
    for name, folder in artifacts.items():
        manifest = _checked(folder)
        entries[name] = {
            "target": manifest["target"],
            "id": manifest["id"],
            "key": manifest["key"]["digest"],
            "level": manifest["level"],
            "features": manifest["features"],
            "bytes": sum(entry["bytes"] for entry in manifest["files"].values()),
        }
    data: dict[str, Any] = {"format": BUNDLE_FORMAT, "version": __version__, "artifacts": entries}
    return json.dumps(data | {"id": _bundle_id(data)}, indent=1, sort_keys=True) + "\n"


class OutputUnusable(ArtifactInvalid):
    """A place where a bundle cannot be written."""


def write_bundle(output: Path, artifacts: Mapping[str, Path]) -> None:
    """Make ``output`` the bundle of these artifacts, by target. What it has already stays; earlier targets are removed.

    Raises ``OutputUnusable``.
    """
    text = bundle_text(artifacts)
    try:
        if output.exists() and any(output.iterdir()) and not (output / BUNDLE).is_file():
            raise OutputUnusable(f"{output} is not empty and no bundle; give --output another folder.")
        output.mkdir(parents=True, exist_ok=True)
        earlier = read_bundle(output) if (output / BUNDLE).is_file() else {}
        for target, folder in artifacts.items():
            if not _is_copy(output / target, folder):
                _copy(folder, output / target)
        if not (output / BUNDLE).is_file() or (output / BUNDLE).read_text() != text:
            part = output / f".{BUNDLE}"
            part.write_text(text)
            part.replace(output / BUNDLE)
        for target in earlier.keys() - artifacts.keys():
            shutil.rmtree(output / target, ignore_errors=True)
    except OSError as error:
        raise OutputUnusable(
            f"cannot write {output}: {error.strerror or error}. Free space, or give --output another folder."
        ) from error


def _is_copy(folder: Path, of: Path) -> bool:
    try:
        mine, theirs = read_manifest(folder), read_manifest(of)
    except ArtifactInvalid as error:
        _log.warning("%s is written again: %s", folder, error)
        return False
    return mine is not None and theirs is not None and mine["id"] == theirs["id"]


def _copy(source: Path, target: Path) -> None:
    part = target.with_name(f".{target.name}")
    shutil.rmtree(part, ignore_errors=True)
    _copy_files(source, part)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)


def _copy_files(source: Path, target: Path) -> None:
    for name in (*_names(source), MANIFEST):  # the manifest last, as a build does
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def _names(folder: Path) -> list[str]:
    return sorted(_checked(folder)["files"])


# Packed files


def pack(artifacts: Mapping[str, Path], file: Path) -> None:
    """Put these artifacts, by name, into one file; equal artifacts give equal bytes. Raises ``OutputUnusable``."""
    text = bundle_text(artifacts)
    part = file.with_name(f".{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as packed:
            _add(packed, BUNDLE, text.encode())
            for name in sorted(artifacts):
                for file_name in (*_names(artifacts[name]), MANIFEST):
                    _add(packed, f"{name}/{file_name}", (artifacts[name] / file_name).read_bytes())
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OutputUnusable(
            f"cannot write {file}: {error.strerror or error}. Free space, or name another file."
        ) from error


def _add(packed: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.create_system = 3  # the same wherever it is packed
    info.external_attr = 0o644 << 16
    packed.writestr(info, data)


def _open_zip(file: Path) -> zipfile.ZipFile:
    try:
        packed = zipfile.ZipFile(file)
    except _ZIP_ERRORS as error:
        raise ArtifactInvalid(
            f"{file} is no packed artifact, or breaks off ({error}). Copy or build it again."
        ) from error
    if BUNDLE not in packed.namelist():
        packed.close()
        raise ArtifactInvalid(f"{file} is a zip, but no packed artifact: it has no {BUNDLE}.")
    return packed


def _member(packed: zipfile.ZipFile, name: str) -> bytes:
    try:
        return packed.read(name)
    except _ZIP_ERRORS as error:
        raise ArtifactInvalid(
            f"{packed.filename} is damaged at {name} ({error}). Copy or build it again."
        ) from error


def _extract(packed: zipfile.ZipFile, name: str, folder: Path) -> None:
    for member in packed.namelist():
        first, _, rest = member.partition("/")
        if first != name or not rest:
            continue
        inside = PurePosixPath(rest)
        if inside.is_absolute() or ".." in inside.parts:
            raise ArtifactInvalid(
                f"{packed.filename} is damaged: it names a file outside of itself, {member!r}."
            )
        (folder / inside).parent.mkdir(parents=True, exist_ok=True)
        (folder / inside).write_bytes(_member(packed, member))


def import_artifacts(file: Path) -> dict[str, bool]:
    """Put every artifact of a packed file into the cache, under its key; by key, whether it was not there before.

    Raises ``ArtifactInvalid``, ``CacheUnusable``.
    """
    with _open_zip(file) as packed:
        entries = _entries(_member(packed, BUNDLE), file)
        new = {}
        for name, entry in entries.items():
            place = artifact_path(str(entry["key"]))
            if place.parent != artifact_path("any").parent:
                raise ArtifactInvalid(f"{file} is damaged: {entry['key']!r} is no key.")
            new[place.name] = _provide(packed, name, str(entry["id"]), place)
            try:
                check_key(place, _checked(place))
            except ArtifactInvalid:
                discard(place)
                raise
    return new
