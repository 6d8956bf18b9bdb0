"""Two real artifacts of a tiny model: one built without a pass."""

import json
from pathlib import Path

import pytest

from compilerllm.cli.main import main
from tests.models.tiny import tiny_model

FLAGS = "--target cpu --max-num-seqs 2 --max-num-batched-tokens 32"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_skipped_pass_is_seen_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the key, the passes, the graph, the memory plan and the kernels; predicted with one machine's speed."""
    monkeypatch.setenv("COMPILERLLM_CACHE_DIR", str(tmp_path / "cache"))
    place, out = tmp_path / "model", tmp_path / "diff.json"
    tiny_model("llama").save_pretrained(place)
    built = ["diff", str(place), str(place), "--old", FLAGS, "--new", f"{FLAGS} --skip-passes fuse_gated"]
    assert main([*built, "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    assert [k["field"] for k in data["key"]] == ["passes.skip"]
    assert {p["pass"]: p["matches"] for p in data["passes"]}["fuse_gated"][1] is None
    (layer,) = [f for f in data["functions"] if f["function"].startswith("layer")]
    assert any(line.startswith("-") and "linear_gated(" in line for line in layer["diff"])
    assert {m["item"]: m["delta"] for m in data["memory"]}["intermediate values"] > 0
    for bucket in data["buckets"]:
        rows = {(k["op"], k["what"]) for k in bucket["kernels"]}
        assert {("linear_gated", "removed"), ("gated_act", "added")} <= rows
        assert bucket["step_us_delta"] == pytest.approx(sum(k["us_delta"] for k in bucket["kernels"]))
    capsys.readouterr()
    folders = [str(f.parent) for f in sorted((tmp_path / "cache/artifacts").glob("*/manifest.json"))]
    assert main(["diff", folders[0], folders[0]]) == 0
    assert "the same artifact, byte for byte" in capsys.readouterr().out
    assert main(["diff", *folders, "--bucket", "decode-1"]) == 0
    shown = capsys.readouterr().out
    assert "decode-1: predicted" in shown and "decode-2" not in shown
