"""Artifacts: what a server refuses to run, and that builders do not get into each other's way."""

import os
import sys
import time
from pathlib import Path

import pytest

from compilerllm.artifact import ArtifactInvalid, artifact_path, building, read_manifest, write_manifest
from compilerllm.compiled import check_machine
from compilerllm.compiler import CompileFailed, run_child


def test_other_machine_is_refused() -> None:
    manifest = {"target": "cpu-avx9000", "features": ["avx9000", "sse2"]}
    with pytest.raises(ArtifactInvalid, match="built for cpu-avx9000, but this processor has no avx9000"):
        check_machine(manifest)


def test_unfinished_build_counts_as_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COMPILERLLM_CACHE_DIR", str(tmp_path))
    with pytest.raises(KeyboardInterrupt), building("abc"):
        raise KeyboardInterrupt
    assert read_manifest(artifact_path("abc")) is None
    assert not list(artifact_path("abc").parent.iterdir()), "a broken build left something behind"


def test_second_builder_keeps_the_first_ones_artifact(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COMPILERLLM_CACHE_DIR", str(tmp_path))
    with building("abc") as late:
        with building("abc") as early:
            write_manifest(early, {"by": "early"})
        write_manifest(late, {"by": "late"})
    manifest = read_manifest(artifact_path("abc"))
    assert manifest is not None and manifest["by"] == "early"


def test_damaged_manifest_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": 1')
    with pytest.raises(ArtifactInvalid, match=r"Delete .* to build it again"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "broken off"])
def test_an_incomplete_file_is_found_before_it_is_used(tmp_path: Path, damage: str) -> None:
    library = tmp_path / "program.so"
    library.write_bytes(b"x" * 100)
    write_manifest(tmp_path, {"key": "abc"})
    assert read_manifest(tmp_path) is not None
    if damage == "missing":
        library.unlink()
    else:
        os.truncate(library, 50)
    with pytest.raises(ArtifactInvalid, match=rf"program\.so .*Delete {tmp_path} to build it again"):
        read_manifest(tmp_path)


def test_what_killed_builds_left_is_removed_once_it_is_old(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COMPILERLLM_CACHE_DIR", str(tmp_path))
    artifacts = artifact_path("abc").parent
    for name in (".abc-old", ".abc-running"):
        (artifacts / name).mkdir(parents=True)
    os.utime(artifacts / ".abc-old", (time.time() - 90_000,) * 2)
    with building("abc") as folder:
        write_manifest(folder, {})
    assert sorted(p.name for p in artifacts.iterdir()) == [".abc-running", "abc"]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL.*memory ran out"),
        ("""print('error "no room"'); raise SystemExit(1)""", "^no room$"),
        ("raise SystemExit('odd')", "exit code 1: odd"),
    ],
)
def test_how_a_build_ends_is_told_in_a_line(program: str, says: str) -> None:
    with pytest.raises(CompileFailed, match=says) as caught:
        run_child([sys.executable, "-c", program])
    assert "\n" not in str(caught.value)


def test_an_unforeseen_error_is_a_line_and_its_traceback_a_note(tmp_path: Path) -> None:
    """A request that no face makes, so that reading it is a mistake of ours."""
    command = [sys.executable, "-P", "-m", "compilerllm.building"]
    with pytest.raises(CompileFailed, match=r"not foreseen.*--debug") as caught:
        run_child([*command, '{"colour": "red"}', str(tmp_path)])
    assert "\n" not in str(caught.value)
    assert "Traceback" in caught.value.__notes__[0]


def test_an_interrupted_build_ends_its_process() -> None:
    pids: list[int] = []

    def interrupt(number: int, stage: str) -> None:
        pids.append(int(stage))
        raise KeyboardInterrupt

    program = "import os, time; print('stage 0', os.getpid(), flush=True); time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        run_child([sys.executable, "-c", program], interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
