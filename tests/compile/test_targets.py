"""Which target is built for, and what an artifact for it depends on."""

from pathlib import Path

import pytest

from compilerllm.cli.main import main
from compilerllm.compiler import CompileRequest, artifact_key
from compilerllm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from compilerllm.kernels.triton.target import find_cuda_target
from compilerllm.kernels.tuning import BadTuningData, TunedChooser, TuningData, tuning_digest


def checkpoint(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def tuning(cache: Path, us: float) -> Path:
    data = TuningData("H200")
    data.add("linear", {"M": 1, "N": 3, "K": 5}, {"path": "gemv"}, us)
    path = cache / "tuning" / "h200.json"
    path.parent.mkdir(exist_ok=True)
    data.write(path)
    return path


def test_new_figures_make_new_artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the target's chip alone: a build for another, or for a CPU, is found as before."""
    monkeypatch.setenv("COMPILERLLM_CACHE_DIR", str(tmp_path))
    place = checkpoint(tmp_path / "model")
    requests = [CompileRequest("m", target=target) for target in ("sm_90", "sm_80", "cpu-avx2")]
    before = [artifact_key(r, place) for r in requests]
    path = tuning(tmp_path, 5.0)
    after = [artifact_key(r, place) for r in requests]
    assert [b == a for b, a in zip(before, after, strict=True)] == [False, True, True]
    tuning(tmp_path, 6.0)
    assert artifact_key(requests[0], place) not in (before[0], after[0])
    path.unlink()
    assert artifact_key(requests[0], place) == before[0]


def test_what_is_hashed_is_what_is_read(tmp_path: Path) -> None:
    target = find_cuda_target("sm_90")
    tuning(tmp_path, 5.0)
    own = tmp_path / "tuning"
    data = TunedChooser.for_target(target, own).data
    assert data is not None and data.find("linear", {"M": 1, "N": 3, "K": 5})[1]
    assert tuning_digest(target, own) != tuning_digest(target)


def test_tuning_data_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "h200.json").mkdir()
    with pytest.raises(BadTuningData, match="Delete it"):
        tuning_digest(find_cuda_target("sm_90"), tmp_path)


def test_a_target_may_be_another_machine() -> None:
    config = EngineConfig(ModelConfig("m", device="cpu"), CacheConfig(), SchedulerConfig())
    assert CompileRequest.of(config, "sm_100").target == "sm_100"
    assert CompileRequest.of(config).target == "cpu"


@pytest.mark.parametrize(
    ("target", "known"), [("cuda", "sm_90"), ("sm_61", "sm_80"), ("cpu-sse", "cpu-avx2")]
)
def test_an_unknown_target_lists_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, known: str
) -> None:
    place = checkpoint(tmp_path / "model")
    assert main(["compile", str(place), "--target", target]) == 1
    said = capsys.readouterr().err
    assert f"{target!r}" in said and known in said and "Traceback" not in said
