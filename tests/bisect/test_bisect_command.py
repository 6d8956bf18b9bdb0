"""The command: bad input is told before any work, its report is JSON too, its exit status says what it found."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compilerllm.bisect.errors import BadPrompt
from compilerllm.bisect.opening import make_workload
from compilerllm.bisect.workload import Workload
from compilerllm.cli.main import main
from tests.bisect.subjects import bisect, subject
from tests.models.tiny import TINY, tiny_model
from tests.passes.captured import Decoder


def test_workload_covers_prompts_mixed_steps_and_decodes() -> None:
    work = Workload.of(list(range(40)), 48, 64)
    steps = work.steps(2)
    assert [s.max_query for s in steps] == [max(c) for c in work.chunks]
    assert {len(s.seq_lens) for s in steps} == {2}
    assert sum(s.max_query == 1 for s in steps) == 4 and min(work.chunks[1]) == 1
    assert sorted(map(sum, zip(*work.chunks, strict=True))) == sorted(map(len, work.sequences))
    blocks = [b for row in steps[0].block_tables[0].tolist() for b in row if b >= 0]
    assert len(set(blocks)) == len(blocks) and max(blocks) < work.num_blocks
    rows = [torch.arange(len(s))[:, None].float() + 100 * i for i, s in enumerate(work.sequences)]
    assert [len(r) for r in work.by_step(rows)] == [len(s.token_ids) for s in steps]


@pytest.mark.parametrize(
    ("prompt", "ids", "encode", "said"),
    [
        ("short", None, lambda text: [1, 2], "at least 8"),
        (None, "1,2,x", None, "whole numbers"),
        (None, "1,2,3,4,5,6,7,99", None, "outside the model's vocabulary of 48"),
        ("text", "1,2", None, "twice"),
        ("some text", None, None, "no tokenizer"),
        (None, ",".join(["1"] * 65), None, "at most 64"),
    ],
)
def test_bad_prompts(prompt: str | None, ids: str | None, encode: Any, said: str) -> None:
    with pytest.raises(BadPrompt, match=said):
        make_workload(subject(Decoder().module()), prompt, ids, encode)


def test_without_tokenizer_and_prompt_any_tokens_do() -> None:
    work = make_workload(subject(Decoder().module()), None, None, None)
    assert len(set(work.sequences[0])) == len(work.sequences[0]) >= 40


def test_unknown_pass_and_folder_are_told_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["bisect", str(tmp_path), "--skip-passes", "fuse_everything"]) == 1
    assert "there is no pass 'fuse_everything'" in capsys.readouterr().err
    assert main(["bisect", str(tmp_path), "--json", str(tmp_path / "no" / "report.json")]) == 1
    assert "is no folder" in capsys.readouterr().err
    assert main(["bisect", str(tmp_path / "nothing")]) == 1


def test_report_as_json_and_text() -> None:
    report = bisect(subject(Decoder().module()))
    data = json.loads(json.dumps(report.to_json()))
    assert data["verdict"]["kind"] == "right" and data["logits"]["within"] is True
    assert [s["step"] for s in data["logits"]["steps"]] == list(report.steps)
    assert "verdict: right." in report.text() and "decode of 2 sequences" in report.text()


def check(name: str, folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    tiny_model(name).save_pretrained(folder / "model")
    report = folder / "report.json"
    status = main(["bisect", str(folder / "model"), "--json", str(report), *flags])
    said = capsys.readouterr()
    assert status == 0, said.out + said.err
    assert "verdict: right." in said.out
    data: dict[str, Any] = json.loads(report.read_text())
    assert data["verdict"]["kind"] == "right" and not data["nodes"]
    return data


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_architectures_are_right(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way of a user, in bf16, every kernel looked at."""
    monkeypatch.setenv("COMPILERLLM_CACHE_DIR", str(tmp_path / "cache"))
    data = check(name, tmp_path, capsys, "--dtype", "bfloat16", "--every-node")
    assert data["nodes_checked"] > 15 and len(data["layers"]) >= 3
    assert all(layer["kernels"] < 0.2 for layer in data["layers"])


@pytest.mark.slow
@pytest.mark.weights
def test_a_real_model_is_right(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMPILERLLM_CACHE_DIR", str(tmp_path / "cache"))
    assert main(["bisect", str(smollm2_gguf), "--dtype", "bfloat16"]) == 0
    assert "verdict: right." in capsys.readouterr().out
