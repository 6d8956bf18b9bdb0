"""``compilerllm compile --target``: programs for a GPU that this machine need not have."""

from pathlib import Path
from typing import Any

import pytest

from compilerllm.artifact import read_manifest
from compilerllm.cli.main import main
from tests.models.tiny import tiny_config, tiny_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILERLLM_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sm_75", "unknown CUDA target 'sm_75'; this version builds for sm_80, sm_89, sm_90, sm_100"),
        ("avx9", "unknown target 'avx9'"),
    ],
)
def test_unknown_targets(tmp_path: Path, capsys: Any, name: str, words: str) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    assert main(["compile", str(tmp_path), "--target", name]) == 1
    err = capsys.readouterr().err
    assert words in err and "sm_90" in err and "Traceback" not in err


@pytest.mark.slow  # sixty kernels
def test_artifact_for_a_gpu(tmp_path: Path, capsys: Any) -> None:
    tiny_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    flags = ["--max-num-seqs", "1", "--max-num-batched-tokens", "16", "--optimization-level", "1"]
    assert main(["compile", str(tmp_path / "model"), "--target", "sm_90", *flags]) == 0
    said = capsys.readouterr()
    assert "sm_90" in said.out + said.err
    (artifact,) = (p for p in (tmp_path / "cache/artifacts").iterdir() if p.is_dir())
    manifest = read_manifest(artifact)
    assert manifest is not None and (manifest["target"], manifest["capability"]) == ("sm_90", 90)
    assert any(name.endswith(".cubin") for name in manifest["files"])
