"""Faults in a GPU's templates and in the passes of its buckets, with kernels that are interpreted."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compilerllm import cuda_artifact
from compilerllm.ir.graph import Module
from compilerllm.ir.text import parse_module
from compilerllm.kernels.triton import interpret, source
from compilerllm.passes.report import PassReport
from tests.bisect.subjects import interpreted, subject
from tests.kernels.triton.test_architectures import LargestTiles
from tests.passes.captured import Decoder

Rewrite = Callable[[Module, PassReport], Module]
SMALL = Decoder(layers=1, hidden=32, heads=2, kv_heads=1, dim=16, ffn=32)


def break_template(monkeypatch: pytest.MonkeyPatch, module: str, right: str, wrong: str) -> None:
    """Interpret a copy of a template module in which one line is wrong."""
    text = source.source_text(module).partition("\0")[0]
    assert text.count(right) >= 1, f"templates/{module}.py has changed: no {right!r}"
    broken = source.generated(text.replace(right, wrong))
    function = source.function

    def patched(template: str, interpreted: bool = False) -> Any:
        where, _, name = template.partition(":")
        return function(f"{broken}:{name}" if where == module else template, interpreted)

    monkeypatch.setattr(interpret, "function", patched)


def test_eps_dropped_from_norms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    break_template(monkeypatch, "norm", "+ EPS", "+ 0.0 * EPS")
    module = parse_module(SMALL.text().replace("eps=1e-06", "eps=3.0"))
    report = interpreted(subject(module, "sm_90"), tmp_path, LargestTiles())
    assert report.verdict.kind == "kernel", report.text()
    assert report.verdict.kernel.startswith("norm:"), report.verdict.text
    assert "norm" in report.verdict.text and report.verdict.shapes


@pytest.mark.slow
def test_keys_stored_unrotated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Seen in the cache, before attention reads it."""
    break_template(
        monkeypatch, "rope", "store_pairs(kv_row, ra, rb, kv_mask", "store_pairs(kv_row, a, b, kv_mask"
    )
    report = interpreted(subject(SMALL.module(), "sm_90"), tmp_path, LargestTiles())
    assert report.verdict.kind == "kernel", report.text()
    assert report.verdict.kernel.startswith("rope:") and report.verdict.path == "model.layers.0"
    assert report.nodes[0].result == "the cache" and report.nodes[0].op == "qkv_rope_write"


@pytest.mark.slow
def test_fault_of_a_buckets_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """fuse_qkv_attention, of decode buckets alone, loses the scale: the pass is named, the way around is not to skip it."""
    passes = cuda_artifact.bucket_passes

    def broken(run: Rewrite) -> Rewrite:
        def fuse_qkv_attention(module: Module, report: PassReport) -> Module:
            made = run(module, report)
            nodes = tuple(
                replace(n, attrs={**n.attrs, "scale": 1.0}) if n.op == "qkv_attention" else n
                for n in made.main.nodes
            )
            return made.with_functions(replace(made.main, nodes=nodes))

        return fuse_qkv_attention if run.__name__ == "fuse_qkv_attention" else run

    monkeypatch.setattr(cuda_artifact, "bucket_passes", lambda bucket: [broken(p) for p in passes(bucket)])
    report = interpreted(subject(SMALL.module(), "sm_90"), tmp_path, LargestTiles())
    assert report.verdict.kind == "pass", report.text()
    assert report.verdict.pass_name == "fuse_qkv_attention"
    assert "qkv_attention(" in report.verdict.node and report.verdict.step == "decode of 2 sequences"
    assert not report.verdict.skippable


@pytest.mark.slow
def test_right_program_is_right(tmp_path: Path) -> None:
    report = interpreted(subject(SMALL.module(), "sm_90"), tmp_path, LargestTiles(), every_node=True)
    assert report.right and not report.nodes, report.text()
    assert report.checked_nodes >= 10
