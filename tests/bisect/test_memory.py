"""A memory plan in which two values that are needed at once share bytes: the verdict must name both."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from compilerllm.bisect.plan import cpu_overlaps, lives
from compilerllm.bisect.subject import CpuArtifact
from compilerllm.ir.step import Bucket
from compilerllm.ir.text import parse_module
from compilerllm.kernels.cpu.emit import emit_program
from compilerllm.kernels.cpu.select import select_layouts
from compilerllm.kernels.cpu.target import find_target
from compilerllm.passes import plan_memory
from compilerllm.planning import alias_table, plan_program
from tests.bisect.subjects import TARGET, artifact, bisect, on_cpu, subject
from tests.passes.captured import Decoder

SMALL = Decoder(layers=2, hidden=32, heads=2, kv_heads=1, dim=16, ffn=32)


def forget(lives_of: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Lives in which the value that ``name`` begins is dead as soon as it is made."""

    def wrong(*args: Any) -> Mapping[Any, Any]:
        found = dict(lives_of(*args))
        for value, life in found.items():
            if value.name.startswith(name):
                found[value] = plan_memory.Life(life.first, life.first)
        return found

    return wrong


def test_overlaps_of_a_plan_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without running anything: right plans have none, a life cut short makes one."""
    target = find_target(TARGET)
    module = select_layouts(subject(SMALL.module()).final, target)
    program = emit_program(module, target)
    bucket = Bucket(64, 2, 64, 64)
    right = plan_program(module, program, bucket, alias_table(module))
    assert not list(cpu_overlaps(module, program, right, bucket))
    monkeypatch.setattr(plan_memory, "_lives", forget(plan_memory._lives, "packed"))
    wrong = plan_program(module, program, bucket, alias_table(module))
    found = list(cpu_overlaps(module, program, wrong, bucket))
    assert found and all("packed" in (o.first + o.second) for o in found)
    assert "share bytes" in str(found[0])


def test_lives_go_through_views() -> None:
    graph = parse_module(
        "func @main(%x: f32[T, 8]) {\n  dim T in [1, 64]\n  %a = silu(%x) : f32[T, 8]\n"
        "  %b = reshape(%a, shape=[T, 2, 4]) : f32[T, 2, 4]\n  %c = silu(%x) : f32[T, 8]\n  %d = silu(%b) : f32[T, 2, 4]\n"
        "  return %c, %d\n}\n"
    ).main  # fmt: skip
    spans = {value.name: span for value, span in lives(graph).items()}
    assert spans["a"] == (0, 3) and spans["c"] == (2, 4)


@pytest.mark.slow
def test_two_values_in_the_same_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COMPILERLLM_CACHE_DIR", str(tmp_path / "cache"))
    made = subject(SMALL.module())
    with monkeypatch.context() as patch:
        patch.setattr(plan_memory, "_lives", forget(plan_memory._lives, "n1"))
        whole = artifact(made, tmp_path / "artifact")
    report = bisect(whole, CpuArtifact(whole))
    assert report.verdict.kind == "memory", report.text()
    assert len(report.verdict.values) == 2 and "share bytes" in report.verdict.text
    assert not report.nodes, "every kernel is right by itself"
    assert on_cpu(made, tmp_path / "right").right
