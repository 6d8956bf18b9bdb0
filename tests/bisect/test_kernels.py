"""Faults put into the CPU's templates, one at a time: the verdict must name the kernel, the node and the shape."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from compilerllm.bisect.subject import Subject
from compilerllm.ir.text import parse_module
from compilerllm.kernels.cpu import build
from tests.bisect.subjects import on_cpu, subject
from tests.passes.captured import Decoder

SMALL = Decoder(layers=2, hidden=32, heads=2, kv_heads=1, dim=16, ffn=32)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("COMPILERLLM_CACHE_DIR", str(tmp_path / "cache"))
    yield
    build.templates_hash.cache_clear()


def break_template(
    monkeypatch: pytest.MonkeyPatch, folder: Path, header: str, right: str, wrong: str
) -> None:
    """Build from a copy of the templates in which one line of ``header`` is wrong."""
    shutil.copytree(build.SOURCE_DIR, folder)
    text = (folder / header).read_text()
    assert text.count(right) >= 1, f"{header} has changed: no {right!r}"
    (folder / header).write_text(text.replace(right, wrong))
    monkeypatch.setattr(build, "SOURCE_DIR", folder)
    build.templates_hash.cache_clear()


def small(**changed: object) -> Subject:
    return subject(replace(SMALL, **changed).module())  # type: ignore[arg-type]


def test_eps_dropped_from_norms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With an eps that matters, or nobody could tell."""
    break_template(monkeypatch, tmp_path / "csrc", "norm.h", "/ float(K) + p.eps)", "/ float(K))")
    module = parse_module(SMALL.text().replace("eps=1e-06", "eps=3.0"))
    report = on_cpu(subject(module), tmp_path / "artifact")
    assert report.verdict.kind == "kernel", report.text()
    assert report.verdict.kernel == "add_rms_norm" and report.verdict.path == "model.layers.0"
    assert "bfloat16[40, 32]" in report.verdict.shapes, report.verdict.shapes
    assert {n.op for n in report.nodes} == {"add_rms_norm"}
    assert "add_rms_norm" in report.text() and "OUTSIDE" in report.text()


@pytest.mark.slow
def test_causal_bound_off_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    break_template(
        monkeypatch, tmp_path / "csrc", "attention.h", "p.causal ? position + 1 : it.context", "p.causal ? position : it.context"
    )  # fmt: skip
    report = on_cpu(small(), tmp_path / "artifact")
    assert report.verdict.kind == "kernel", report.text()
    assert report.verdict.kernel == "paged_attention" and report.verdict.path == "model.layers.0"
    assert {n.op for n in report.nodes} == {"paged_attention"}


@pytest.mark.slow
def test_keys_written_one_row_too_far(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What goes to the cache alone is seen there, not first where attention reads it."""
    break_template(
        monkeypatch, tmp_path / "csrc", "kv_cache.h", "memcpy(to + d / 2 * 16, row + d, 4)", "memcpy(to + d / 2 * 16, row + (d ^ 2), 4)"
    )  # fmt: skip
    report = on_cpu(small(), tmp_path / "artifact")
    assert report.verdict.kind == "kernel", report.text()
    assert report.verdict.kernel == "qkv_rope_write"
    assert report.nodes[0].result == "the cache"
    assert {n.op for n in report.nodes} == {"qkv_rope_write"}


@pytest.mark.slow
def test_sums_in_bfloat16(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is far off, but every product errs more than a rounding explains."""
    break_template(
        monkeypatch, tmp_path / "csrc", "gemm_fma.h", "acc[r] = fma(odd, set1(x[r][kb + 2 * i + 1]), acc[r]);",
        "acc[r] = Round<bf16>::apply(fma(odd, set1(x[r][kb + 2 * i + 1]), acc[r]));",
    )  # fmt: skip
    report = on_cpu(small(hidden=64), tmp_path / "artifact")
    assert report.verdict.kind == "kernel", report.text()
    assert report.verdict.kernel == "linear" and report.verdict.path == "model.layers.0"
    assert report.verdict.step.startswith(("prompts", "22 tokens", "18 tokens"))
    # Attention multiplies queries and keys by the same template.
    assert {n.op for n in report.nodes} <= {"linear", "linear_gated", "paged_attention"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "decoder", [SMALL, Decoder(dtype="f32", qk_norm=True, bias=True), Decoder(weights="q8_0")]
)
def test_right_kernels_are_right(decoder: Decoder, tmp_path: Path) -> None:
    """Every node is within its budget, not only the logits."""
    report = on_cpu(subject(decoder.module()), tmp_path / "artifact", every_node=True)
    assert report.right and not report.nodes, report.text()
    assert report.checked_nodes > 16
    assert all(layer.kernels is not None and layer.kernels < 0.1 for layer in report.layers)
