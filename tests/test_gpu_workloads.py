"""The GPU comparison's workloads are those that the peers ran, and its script says what happens."""

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


class Echo:
    """An engine that takes time by the token."""

    def generate(self, prompts: list[list[int]], out_lens: list[int]) -> list[list[int]]:
        time.sleep(1e-5 * max(out_lens))
        return [[prompt[0] + i for i in range(n)] for prompt, n in zip(prompts, out_lens, strict=True)]


def test_lengths_tokens_and_bytes_are_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    w = load("gpu_workloads", monkeypatch)
    prompts, outputs = w.offline_lengths()
    assert (len(prompts), sum(prompts), sum(outputs)) == (512, 275_168, 134_091)
    floors = {}
    for folder in sorted((BENCHMARKS / "models").iterdir()):
        shape = w.load_shape(folder)
        floors[folder.name] = [
            round(w.decode_weight_bytes(shape, b) / w.COPY_BANDWIDTH * 1e3, 2) for b in (1, 64)
        ]
    assert floors == {"llama31-8b": [3.49, 3.49], "qwen3-0.6b": [0.28, 0.28], "qwen3-30b-a3b": [1.41, 13.84]}


def test_every_workload_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    w = load("gpu_workloads", monkeypatch)
    shape = w.load_shape(BENCHMARKS / "models" / "qwen3-0.6b")
    for name in (*w.WORKLOADS, "decode3"):
        result = w.run(name, Echo(), shape, w.SMALL)
        assert "gpu" in result and result["wall_s"] >= 0
    with pytest.raises(ValueError, match="no workload 'decodeX'"):
        w.run("decodeX", Echo(), shape, w.SMALL)


def test_a_workload_that_fails_loses_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load("gpu_workloads", monkeypatch)
    script = load("h200", monkeypatch)

    class Engine(Echo):
        def __init__(self, model: Path, options: dict[str, Any]) -> None:
            self.options, self.cached_tokens = options, 0
            self.llm = type("Llm", (), {"start_seconds": {"compile": 1.5}, "card": {}})

        def generate(self, prompts: list[list[int]], out_lens: list[int]) -> list[list[int]]:
            if len(prompts) == 8:
                raise ArithmeticError("eight are too many")
            return super().generate(prompts, out_lens)

    monkeypatch.setattr(script, "Ours", Engine)
    monkeypatch.setenv("COMPILERLLM_COMMIT", "abc")
    out = tmp_path / "new" / "h.jsonl"
    flags = ["--small", "--start", "warm", "--workloads", "decode1,decode8,prefill8000", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["h200.py", "qwen3-0.6b", *flags])
    assert script.main() == 1
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["workload"] for r in records] == ["startup-warm", "decode1", "decode8", "prefill8000"]
    assert {(r["engine"], r["label"], r["commit"]) for r in records} == {("compilerllm", "M4", "abc")}
    assert records[0]["compile_s"] == 1.5 and records[1]["cached_tokens"] == 0
    assert records[2]["error"] == "ArithmeticError: eight are too many"
    table = capsys.readouterr().out
    assert "1.625 to 1.923" not in table and "ERROR ArithmeticError" in table, (
        "small sizes compare with nothing"
    )
    script.print_table([{name: value for name, value in records[1].items() if name != "small"}])
    assert "1.625 to 1.923" in capsys.readouterr().out
