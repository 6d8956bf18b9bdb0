"""A GPU's artifact, explained: launches to nodes and modules, choices with their figures, costs, near misses."""

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from compilerllm.artifact import ArtifactInvalid, read_manifest, write_manifest
from compilerllm.cuda_artifact import flat_module, prepare_bucket
from compilerllm.explain.collect import Look, collect
from compilerllm.explain.report import Report
from compilerllm.explain.steps import Step, UnknownBucket
from compilerllm.explain.text import render
from compilerllm.ir.step import Bucket
from compilerllm.ir.text import print_module
from compilerllm.kernels.groups import group_name, paged_windows
from compilerllm.kernels.triton.emit import draft_program, finish_program
from compilerllm.kernels.triton.emit_sampling import draft_sampling, finish_sampling
from compilerllm.kernels.triton.target import find_cuda_target
from compilerllm.kernels.tuning import TunedChooser, TuningData
from compilerllm.passes.pipeline import Options, run_pipeline
from tests.passes.captured import Decoder

BUCKETS = (Bucket(2, 2, 2, 1), Bucket(32, 16, 16, 32), Bucket(32, 32, 32, 32))
DECODER = Decoder(hidden=64, heads=4, kv_heads=2, dim=16, ffn=96)
TIMED: dict[str, int | str] = {
    "op": "norm_linear_gated",
    "M": 2,
    "N": 96,
    "K": 64,
    "dtype": "bf16",
    "out": "bf16",
    "act": "silu",
    "bias": 0,
}


def write_artifact(folder: Path, data: TuningData | None) -> Path:
    """As the compiler does, but for the machine code."""
    folder.mkdir(parents=True)
    target, chooser = find_cuda_target("sm_90"), TunedChooser(data)
    captured = DECODER.module()
    served, _ = run_pipeline(captured, Options(level=2, target="sm_90"))
    program = finish_program(draft_program(flat_module(served), BUCKETS, target, 2, chooser, prepare_bucket))
    sampling = finish_sampling(*draft_sampling(DECODER.vocab, [2, 16, 32], target))
    for part, made in (("program", program), ("sampling", sampling)):
        (folder / f"{part}.json").write_text(json.dumps(made.to_json()))
    for name, module in (("captured", captured), ("module", served)):
        (folder / f"{name}.ir").write_text(print_module(module, origins=True))
    manifest = {
        "version": "0", "level": 2, "target": "sm_90", "facts": {"dtype": "bf16", "num_layers": 2}, "features": [],
        "program": "program.json", "sampling": "sampling.json", "picks": chooser.report(), "vocab_size": DECODER.vocab,
        "max_model_len": 128, "buckets": [asdict(b) for b in BUCKETS], "key": {"digest": "", "fields": {"passes.skip": []}},
        "groups": [{"name": group_name(w), "index": i} for i, w in enumerate(paged_windows(served))],
    }  # fmt: skip
    write_manifest(folder, manifest)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with one figure of the user's own, for one candidate that the cost model does not put first."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "tuning").mkdir()
    data = TuningData("H200")
    for candidate, us in zip(_candidates(), (7.5, 9.0), strict=True):
        data.add("linear", TIMED, candidate, us)
    data.write(folder / "tuning" / "h200.json")
    return folder


def _candidates() -> list[dict[str, Any]]:
    from compilerllm.kernels.triton.linear_candidates import candidates
    from compilerllm.kernels.triton.linear_shape import shape_of

    found = candidates(shape_of(TIMED, 2, 2), find_cuda_target("sm_90"), True, ())
    return [dict(found[3]), dict(found[1])]


@pytest.fixture(scope="module")
def artifact(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = TuningData.read(cache / "tuning" / "h200.json")
    return write_artifact(tmp_path_factory.mktemp("made") / "artifact", data)


@pytest.fixture(autouse=True)
def own_figures(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILERLLM_CACHE_DIR", str(cache))


@pytest.fixture(scope="module")
def report(artifact: Path, cache: Path) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILERLLM_CACHE_DIR", str(cache))
        return collect(artifact, "tiny", Look()).report


def test_every_bucket_is_there_with_its_launches(report: Report, artifact: Path) -> None:
    names = [b.name for b in report.buckets]
    assert names[:3] == ["decode-2", "mixed-32-r16", "mixed-32-r32"]
    assert {"sampling-greedy-2", "sampling-sampled-32"} <= set(names) and names[-1].startswith(
        "sampling-full-"
    )
    plans = json.loads((artifact / "program.json").read_text())["plans"]
    assert [len(b.launches) for b in report.buckets[:3]] == [len(p["launches"]) for p in plans]
    assert report.bucket("decode-2").sampling == "sampling-greedy-2"


def test_a_kernel_names_modules_layers_and_passes(report: Report) -> None:
    nodes = [report.nodes[x.node] for x in report.bucket("decode-2").launches]
    gated = list(dict.fromkeys(n for n in nodes if n.op == "norm_linear_gated"))
    assert [n.layer for n in gated] == [0, 1]
    assert [n.path for n in gated] == ["model.layers.0", "model.layers.1"]
    assert gated[1].modules == tuple(
        f"model.layers.1.{m}" for m in ("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj")
    )
    assert {"pack_projections", "raise_gated_act", "fuse_gated", "fuse_norm_linear"} <= set(gated[0].passes)
    (head,) = [
        n for n in nodes if n.modules and n.modules[-1] == "model.embed_tokens" and n.op == "norm_linear"
    ]
    assert head.layer == -1 and head.modules == ("model.norm", "model.embed_tokens")


def test_costs_are_what_a_linear_must_move_and_compute(report: Report) -> None:
    bucket = report.bucket("decode-2")
    launch = next(
        x for x in bucket.launches if report.nodes[x.node].modules[-1:] == ("model.layers.0.mlp.down_proj",)
    )
    assert launch.nbytes == 2 * (64 * 96 + 2 * 96 + 2 * 64)
    assert launch.flops == 2 * 2 * 64 * 96
    assert launch.roofline_us == pytest.approx(launch.nbytes / 4350e3, rel=0.01)
    attention = next(x for x in bucket.launches if report.nodes[x.node].op == "qkv_attention")
    context = (
        2 * 128 * 2 * 2 * 16 * 2
    )  # 2 sequences of 128 tokens (the model's longest): keys and values of 2 heads of 16
    assert attention.nbytes == context + 2 * (2 * 128 + 2 * 64) + 2 * 2 * 2 * 16


def test_a_timed_choice_says_so_and_is_predicted_as_it_was_timed(report: Report) -> None:
    bucket = report.bucket("decode-2")
    nodes = [report.nodes[x.node] for x in bucket.launches]
    gated = [
        x for x, n in zip(bucket.launches, nodes, strict=True) if n.op == "norm_linear_gated" and n.layer == 0
    ]
    launch = gated[0]
    pick = report.picks[launch.pick]
    chosen, other = _candidates()
    assert (pick.why, pick.us, pick.config) == ("timed", 7.5, chosen)
    assert (pick.alternatives[0].config, pick.alternatives[0].us) == (other, 9.0)
    assert pick.alternatives[1].us is None and chosen not in [c.config for c in pick.alternatives]
    assert sum(x.predicted_us for x in gated) == pytest.approx(7.5, rel=0.01)  # of all launches of the node
    assert {p.why for p in report.picks} == {"timed", "cost model"}


def test_passes_of_a_bucket_name_their_buckets(report: Report) -> None:
    whole = [p for p in report.passes if not p.buckets]
    assert whole[0].before == 0 and all(a.after == b.before for a, b in pairwise(whole))
    early = [p for p in report.passes if p.name == "gather_early"]
    assert [p.buckets for p in early] == [("mixed-32-r16", "mixed-32-r32")] and early[0].changed
    texts = {p.after for p in report.passes if p.buckets}
    assert all("norm_linear" in report.texts[t] for t in (max(texts),))
    assert len(set(report.texts)) == len(report.texts)


def test_near_misses_say_where_and_why(report: Report) -> None:
    misses = [m for p in report.passes for m in p.misses if p.name == "fuse_norm_linear"]
    assert [m.path for m in misses] == ["model.layers.1"]
    assert "only sampled rows are normed" in misses[0].reason
    assert "What did not fuse, and why" in render(report)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_text_keeps_to_the_width_and_tells_the_main_things(report: Report, width: int) -> None:
    text = render(report, width)
    tables = text[text.index("== decode-2") :]
    assert max(len(line) for line in tables.splitlines() if not line.startswith("==")) <= max(width, 86)
    assert "layers.*" in render(report, 160) and "timed (7.50 us), next of 1 others 9.00 us (+20%)" in render(
        report, 160
    )


def test_one_bucket_one_kind_or_a_step_of_ones_own(artifact: Path) -> None:
    one = collect(artifact, "tiny", Look(("decode-2",))).report
    assert [b.name for b in one.buckets] == ["decode-2", "sampling-greedy-2"]
    kind = collect(artifact, "tiny", Look(("mixed",))).report
    assert [b.name for b in kind.buckets] == ["mixed-32-r16", "mixed-32-r32"]
    own = collect(artifact, "tiny", Look(step=Step(3, 5, 40))).report.buckets[0]
    assert (own.name, own.tokens, own.sequences, own.context) == ("mixed-32-r16", 15, 3, 40)


@pytest.mark.parametrize("look", [Look(("decode-3",)), Look(step=Step(1, 33, 33))])
def test_what_no_bucket_has_is_refused_with_what_there_is(artifact: Path, look: Look) -> None:
    with pytest.raises(UnknownBucket, match=r"decode-2, mixed-32-r16|largest has 32 tokens"):
        collect(artifact, "tiny", look)


def _changed(artifact: Path, folder: Path, name: str, old: str, new: str) -> Path:
    """A sound artifact in which one file has other contents."""
    folder.mkdir()
    for file in artifact.iterdir():
        text = file.read_text()
        (folder / file.name).write_text(text.replace(old, new) if file.name == name else text)
    manifest = json.loads((folder / "manifest.json").read_text())
    write_manifest(folder, {k: v for k, v in manifest.items() if k not in ("id", "files", "format")})
    assert (folder / name).read_text() != (artifact / name).read_text()
    return folder


def test_an_artifact_of_other_passes_or_emitters_is_not_explained(artifact: Path, tmp_path: Path) -> None:
    other = _changed(artifact, tmp_path / "a", "module.ir", "1e-06", "2e-06")
    with pytest.raises(ArtifactInvalid, match="another module"):
        collect(other, "tiny", Look())
    other = _changed(artifact, tmp_path / "b", "program.json", "qkv_attention(", "kqv_attention(")
    with pytest.raises(ArtifactInvalid, match=r"bucket decode-2 .* launch \d+ differs"):
        collect(other, "tiny", Look())


def test_no_artifact_and_a_damaged_one_are_refused(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactInvalid, match="no finished artifact"):
        collect(tmp_path, "tiny", Look())
    broken = _changed(artifact, tmp_path / "c", "captured.ir", "rms_norm", "rms_norm ")
    (broken / "captured.ir").write_text("func @main")
    assert read_manifest(artifact) is not None
    with pytest.raises(ArtifactInvalid):
        collect(broken, "tiny", Look())
