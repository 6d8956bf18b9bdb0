"""Artifacts: what a server refuses to run, and that builders do not get into each other's way."""

from pathlib import Path

import pytest

from compilerllm.artifact import ArtifactInvalid, artifact_path, building, read_manifest
from compilerllm.compiled import check_machine


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
            (early / "manifest.json").write_text('{"format": 1, "by": "early"}')
        (late / "manifest.json").write_text('{"format": 1, "by": "late"}')
    manifest = read_manifest(artifact_path("abc"))
    assert manifest is not None and manifest["by"] == "early"


def test_damaged_manifest_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": 1')
    with pytest.raises(ArtifactInvalid, match=r"Delete .* to build it again"):
        read_manifest(tmp_path)
