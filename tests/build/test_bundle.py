"""Bundles and packed files: equal bytes for equal artifacts, the right target, and refusals before anything is served."""

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from compilerllm import bundle
from compilerllm.artifact import ArtifactInvalid, CacheUnusable
from compilerllm.bundle import OutputUnusable, WrongTarget, is_artifact, open_artifact, pack, write_bundle
from tests.build.artifacts import tree, write_artifact

TARGETS = ("cpu-generic", "sm_80", "sm_90")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPILERLLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def artifacts(tmp_path: Path) -> dict[str, Path]:
    for target in TARGETS:
        write_artifact(tmp_path / "made" / target, target)
    return {target: tmp_path / "made" / target for target in TARGETS}


def test_a_bundle_opens_at_the_target(artifacts: dict[str, Path], tmp_path: Path) -> None:
    write_bundle(tmp_path / "out", artifacts)
    assert is_artifact(tmp_path / "out")
    for target, made in artifacts.items():
        assert open_artifact(tmp_path / "out", target) == tmp_path / "out" / target
        assert tree(tmp_path / "out" / target) == tree(made)
    assert open_artifact(artifacts["sm_90"]) == artifacts["sm_90"]


def test_a_bundle_is_replaced_and_nothing_else_is(artifacts: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_bundle(out, artifacts)
    before = (out / "sm_90/program.so").stat()
    write_bundle(out, {"sm_90": artifacts["sm_90"]})
    assert sorted(p.name for p in out.iterdir()) == ["bundle.json", "sm_90"]
    assert (out / "sm_90/program.so").stat().st_mtime_ns == before.st_mtime_ns, "what is there is not written"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(OutputUnusable, match="not empty and no bundle"):
        write_bundle(tmp_path / "mine", artifacts)


def test_a_packed_file_depends_on_the_artifacts_alone(
    artifacts: dict[str, Path], tmp_path: Path, own_cache: Path
) -> None:
    pack(artifacts, tmp_path / "a.cllm")
    write_bundle(tmp_path / "out", dict(reversed(artifacts.items())))
    for path in (tmp_path / "out").rglob("*"):
        os.utime(path, (1, 1))
    pack({t: tmp_path / "out" / t for t in reversed(TARGETS)}, tmp_path / "deep" / "b.cllm")
    assert (tmp_path / "a.cllm").read_bytes() == (tmp_path / "deep" / "b.cllm").read_bytes()
    opened = open_artifact(tmp_path / "a.cllm", "sm_80")
    assert tree(opened) == tree(artifacts["sm_80"])
    assert opened == open_artifact(tmp_path / "deep" / "b.cllm", "sm_80"), (
        "the place is the content's address"
    )
    assert [p.name for p in (own_cache / "unpacked").iterdir()] == [opened.name]


@pytest.mark.parametrize("packed", [False, True])
def test_the_machine_chooses(
    artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    write_artifact(tmp_path / "made" / "cpu-avx2", "cpu-avx2")
    artifacts["cpu-avx2"] = tmp_path / "made" / "cpu-avx2"
    place = tmp_path / ("all.cllm" if packed else "all")
    pack(artifacts, place) if packed else write_bundle(place, artifacts)

    def chosen(here: str, features: set[str]) -> str:
        monkeypatch.setattr(bundle, "target_name", lambda device: here)
        monkeypatch.setattr(bundle, "host_features", lambda: frozenset(features))
        return str(json.loads((open_artifact(place) / "manifest.json").read_text())["target"])

    assert chosen("sm_90", {"avx2", "fma"}) == "sm_90"
    assert chosen("cpu", {"avx2", "fma", "sse"}) == "cpu-avx2"
    assert chosen("cpu", {"avx2"}) == "cpu-generic"
    with pytest.raises(
        WrongTarget, match=r"runs here \(sm_100\); it has cpu-avx2, cpu-generic, sm_80, sm_90"
    ):
        chosen("sm_100", set())
    with pytest.raises(WrongTarget, match="no artifact for sm_89"):
        open_artifact(place, "sm_89")


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_only_looked_at_need_not_run_here(
    artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setattr(bundle, "target_name", lambda device: "cpu")
    place = tmp_path / ("one.cllm" if packed else "one")
    alone = {"sm_90": artifacts["sm_90"]}
    pack(alone, place) if packed else write_bundle(place, alone)
    opened = open_artifact(place, to_run=False)
    assert json.loads((opened / "manifest.json").read_text())["target"] == "sm_90"
    with pytest.raises(WrongTarget, match="runs here"):
        open_artifact(place)


def test_the_wrong_target(artifacts: dict[str, Path]) -> None:
    with pytest.raises(WrongTarget, match="built for sm_90, not for cpu"):
        open_artifact(artifacts["sm_90"], "cpu")
    assert open_artifact(artifacts["cpu-generic"], "cpu") == artifacts["cpu-generic"]


def test_another_version(tmp_path: Path) -> None:
    write_artifact(tmp_path / "old", version="0.0.1")
    with pytest.raises(ArtifactInvalid, match=r"built by version 0\.0\.1.*Build it again"):
        open_artifact(tmp_path / "old")
    write_artifact(tmp_path / "older")
    manifest = json.loads((tmp_path / "older/manifest.json").read_text())
    (tmp_path / "older/manifest.json").write_text(json.dumps(manifest | {"format": 1}))
    with pytest.raises(ArtifactInvalid, match="has format 1, another than this version's"):
        open_artifact(tmp_path / "older")


def test_what_is_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    with zipfile.ZipFile(tmp_path / "other.cllm", "w") as file:
        file.writestr("readme", "x")
    for name, words in (
        ("absent", "does not exist"),
        ("empty", "neither manifest.json nor bundle.json"),
        ("notes.txt", "no packed artifact"),
        ("other.cllm", "has no bundle.json"),
    ):
        with pytest.raises(ArtifactInvalid, match=words):
            open_artifact(tmp_path / name)


def flip(at: float) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        index = int(len(data) * at)
        return data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]

    return change


@pytest.mark.parametrize("at", [0.05, 0.2, 0.4, 0.6, 0.8])
@pytest.mark.parametrize("file", ["bundle.json", "sm_90/manifest.json", "sm_90/program.so"])
def test_a_bit_that_flipped_in_a_bundle(
    artifacts: dict[str, Path], tmp_path: Path, file: str, at: float
) -> None:
    write_bundle(tmp_path / "out", {"sm_90": artifacts["sm_90"]})
    path = tmp_path / "out" / file
    path.write_bytes(flip(at)(path.read_bytes()))
    with pytest.raises(ArtifactInvalid):
        open_artifact(tmp_path / "out", "sm_90")


def test_no_byte_of_a_packed_file_may_change(artifacts: dict[str, Path], tmp_path: Path) -> None:
    """Any byte: what opens is what was packed, or nothing does (dates and the like in the zip's own tables may)."""
    pack({"sm_90": artifacts["sm_90"]}, tmp_path / "whole.cllm")
    whole, wanted = (tmp_path / "whole.cllm").read_bytes(), tree(artifacts["sm_90"])
    refused = 0
    for number, at in enumerate(range(0, len(whole), 37)):
        place = tmp_path / f"{number}.cllm"
        place.write_bytes(flip(at / len(whole))(whole))
        try:
            assert tree(open_artifact(place, "sm_90")) == wanted, f"byte {at}"
        except ArtifactInvalid:
            refused += 1
        finally:
            place.unlink()
            for old in (tmp_path / "cache" / "unpacked").glob("*"):
                for path in sorted(old.rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() else path.unlink()
                old.rmdir()
    assert refused > number * 0.8


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
def test_a_packed_file_that_breaks_off(artifacts: dict[str, Path], tmp_path: Path, share: float) -> None:
    pack(artifacts, tmp_path / "a.cllm")
    os.truncate(tmp_path / "a.cllm", int((tmp_path / "a.cllm").stat().st_size * share))
    with pytest.raises(ArtifactInvalid, match="breaks off"):
        open_artifact(tmp_path / "a.cllm", "sm_90")


def test_a_packed_file_stays_in_its_folder(artifacts: dict[str, Path], tmp_path: Path) -> None:
    pack({"sm_90": artifacts["sm_90"]}, tmp_path / "a.cllm")
    with zipfile.ZipFile(tmp_path / "a.cllm", "a") as file:
        file.writestr("sm_90/../../../evil", "x")
    with pytest.raises(ArtifactInvalid, match="outside of itself"):
        open_artifact(tmp_path / "a.cllm", "sm_90")
    assert not list(tmp_path.rglob("evil"))


def test_an_unpacked_copy_that_was_damaged_is_made_anew(
    artifacts: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pack(artifacts, tmp_path / "a.cllm")
    program = open_artifact(tmp_path / "a.cllm", "sm_90") / "program.so"
    program.write_bytes(flip(0.5)(program.read_bytes()))
    os.utime(program, (5, 5))
    opened = open_artifact(tmp_path / "a.cllm", "sm_90")
    assert tree(opened) == tree(artifacts["sm_90"])
    assert "is unpacked again" in caplog.text and "program.so" in caplog.text


def test_nothing_can_be_written(
    artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: no half of a bundle, of a packed file or of an unpacked one is left to be served."""
    pack(artifacts, tmp_path / "a.cllm")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(OutputUnusable, match="No space left"):
        write_bundle(tmp_path / "out", artifacts)
    with pytest.raises(ArtifactInvalid):
        open_artifact(tmp_path / "out", "sm_90")
    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(OutputUnusable, match="No space left"):
        pack(artifacts, tmp_path / "b.cllm")
    assert not (tmp_path / "b.cllm").exists() and not (tmp_path / ".b.cllm.part").exists()
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CacheUnusable, match="No space left"):
        open_artifact(tmp_path / "a.cllm", "sm_90")
    assert not list((tmp_path / "cache" / "unpacked").iterdir())
