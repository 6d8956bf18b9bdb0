"""What validation is for: passes that are wrong on purpose are caught, by pass and node; and how findings are told."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compilerllm.cli.main import main
from compilerllm.cuda_artifact import cuda_buckets
from compilerllm.ir.graph import Module
from compilerllm.ir.text import parse_module
from compilerllm.kernels.triton.target import find_cuda_target
from compilerllm.passes.pipeline import Options, passes_for, run_pipeline
from compilerllm.validation.attributes import attempts
from compilerllm.validation.build import unlike, verify_build
from compilerllm.validation.corpus import cases
from compilerllm.validation.errors import CannotValidate, RewriteInvalid
from compilerllm.validation.rewrites import (
    ASKED,
    RELATIONS,
    Finding,
    entry_for,
    every_pass,
    require_valid,
    validate_pass,
    verify_pipeline,
)
from compilerllm.validation.running import distance
from compilerllm.validation.shrink import shrink
from compilerllm.validation.weights import Weights
from tests.passes.captured import Decoder
from tests.validation import wrong

CASES = {name: module for name, module, _ in cases()}


def stage(pass_name: str, decoder: Decoder) -> Module:
    """A decoder as it comes to a pass."""
    module = decoder.module()
    for entry in passes_for(Options(level=1)):
        new, _ = entry.run(module, Options(level=1))
        if entry.name == pass_name and new is not module:
            return module
        module = new
    raise AssertionError(f"{pass_name} changes nothing")


BATCHED = parse_module("""
func @main(%x: f32[1, T, 8]) {
  dim T in [1, 64]
  %y = softmax(%x, axis=2) : f32[1, T, 8]
  return %y
}
""")
# The wrong pass, where it is tried, and a part of what must be told of the node.
WRONG: list[tuple[Callable[..., Any], Module, str]] = [
    (wrong.fuse_add_norm, stage("fuse_add_norm", Decoder()), "= add_rms_norm("),
    (wrong.fuse_gated, stage("fuse_gated", Decoder()), "= linear_gated("),
    (wrong.pack_projections, stage("pack_projections", Decoder()), "= linear("),
    (wrong.fuse_qkv, stage("fuse_qkv", Decoder(qk_norm=True)), "= qkv_rope_write("),
    (wrong.page_attention, stage("page_attention", Decoder(window=4)), "= paged_attention("),
    (wrong.gather_rows, stage("gather_rows", Decoder()), "= gather_rows("),
    (wrong.rotate_boundary, stage("rotate_boundary", Decoder()), "= full("),
    (wrong.drop_batch, BATCHED, "= softmax("),
    (wrong.shard, CASES["shard/mlp"], "= all_reduce("),
    (wrong.add_adapters, CASES["add_adapters/projection"], "= adapter_add("),
    (wrong.raise_partial_rope, CASES["raise_partial_rope/part"], "= rope("),
    (wrong.fuse_linear_add, stage("fuse_add_norm", Decoder()), "= add("),
]


@pytest.mark.parametrize("run,module,node", WRONG, ids=[w[0].__name__ for w in WRONG])
def test_a_wrong_pass_is_caught(run: Callable[..., Any], module: Module, node: str) -> None:
    assert validate_pass(every_pass()[run.__name__], module, thorough=False) == [], (
        "the right one is valid there"
    )
    found = validate_pass(run, module)
    assert found and all(f.pass_name == run.__name__ for f in found)
    assert any(node in n for f in found for n in f.nodes), found


def test_an_attribute_that_is_not_consumed_is_found_where_the_numbers_are_right() -> None:
    module = CASES["raise_partial_rope/part"]
    assert validate_pass(wrong.raise_partial_rope, module, thorough=False) == []
    (found, *_) = validate_pass(wrong.raise_partial_rope, module)
    assert "attribute 'style'" in found.what and "= rope(" in found.nodes[0]
    assert "half -> interleaved" in found.what


def test_most_attributes_are_exercised() -> None:
    """Where no input shows a change, nothing was shown; that must be the exception."""
    chosen = [(n, m) for n, m in CASES.items() if n.startswith(("fuse_add", "fuse_qkv/", "raise_"))]
    found = [a for n, m in chosen for a in attempts(every_pass()[n.split("/")[0]], m, ASKED) if a.attribute]
    told = {(a.function, a.node, a.attribute) for a in found if a.outcome != "not exercised"}
    everything = {(a.function, a.node, a.attribute) for a in found}
    assert len(everything) > 40 and len(told) > 0.8 * len(everything)


def test_padding_that_leaks_is_told_by_its_kind() -> None:
    found = validate_pass(wrong.fuse_linear_add, stage("fuse_add_norm", Decoder()), thorough=False)
    assert "padded" in {f.kind for f in found}
    assert "one token" not in {f.kind for f in found}, "the sum of one row times zero is nothing"


def test_a_pass_that_fails_or_breaks_the_graph_is_a_finding() -> None:
    def deduplicate(graph: Any, report: Any) -> Any:
        raise KeyError("nothing")

    (found,) = validate_pass(deduplicate, BATCHED)
    assert "the pass fails: KeyError" in str(found)

    def canonicalise(graph: Any, report: Any) -> Any:
        return replace(graph, nodes=())

    (found,) = validate_pass(canonicalise, BATCHED)
    assert "malformed: @main: returns %y, which is not defined" in str(found)


def test_a_function_without_the_name_of_a_pass_is_refused() -> None:
    def fuse_everything(graph: Any, report: Any) -> Any:
        return graph

    with pytest.raises(CannotValidate, match="there is no pass called 'fuse_everything'"):
        entry_for(fuse_everything)


def test_a_pipeline_with_a_wrong_pass() -> None:
    passes = [
        entry_for(wrong.fuse_gated) if p.name == "fuse_gated" else p for p in passes_for(Options(level=1))
    ]
    told: list[tuple[str, bool]] = []
    found = verify_pipeline(
        Decoder().module(), Options(level=1), lambda p, f: told.append((p.name, not f)), passes=passes
    )
    assert {f.pass_name for f in found} == {"fuse_gated"} and found[0].function == "layer"
    assert [name for name, valid in told if not valid] == ["fuse_gated"]
    with pytest.raises(
        RewriteInvalid, match=r"fuse_gated: @layer: result 1 differs .* at %m.* = linear_gated\("
    ):
        require_valid(found)


def test_opt_verify_prints_a_verdict_for_each_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "decoder.ir"
    path.write_text(Decoder().text())
    assert main(["opt", str(path), "--verify"]) == 0
    verdicts = [line for line in capsys.readouterr().err.splitlines() if line.endswith(": valid")]
    assert "fuse_qkv: valid" in verdicts and "page_attention: valid" in verdicts


LARGE = Decoder(layers=32, hidden=4096, heads=32, kv_heads=8, dim=128, ffn=14336, vocab=128256, window=4096)


@pytest.mark.parametrize("more", [{}, {"packed": True}, {"weights": "q8_0"}, {"qk_norm": True, "bias": True}])
def test_a_large_model_becomes_small_and_stays_itself(more: dict[str, Any]) -> None:
    large = replace(LARGE, **more).module()
    small = shrink(large)
    weights = sum(int(i.type.numel) for i in small.param_instances())
    assert weights < 1_000_000
    assert len(list(small.calls())) == 2
    for name in ("main", "layer"):
        kept = [n for n in large.functions[name].nodes if n.op != "call"]
        assert [n.op for n in small.functions[name].nodes if n.op != "call"] == [n.op for n in kept]
    attention = next(n for n in small.functions["layer"].nodes if n.op == "attention")
    assert attention.attrs["window"] == 6 and attention.operand(0).shape[1] == 4 * int(
        attention.operand(1).shape[1]
    )
    ours, theirs = (run_pipeline(m, Options(level=1))[0] for m in (small, large))
    assert not [f for f in unlike(theirs, ours) if f.function != "main"]


def test_sizes_that_odd_numbers_hold_together_stay() -> None:
    small = shrink(Decoder(hidden=4095, heads=3, kv_heads=1, dim=6, ffn=77, vocab=101).module())
    assert small.functions["layer"].param("mlp.up_proj.weight").value.shape == (77, 4095)


def test_other_rewrites_of_the_large_sizes_are_told() -> None:
    one, two = (run_pipeline(Decoder(bias=b).module(), Options(level=1))[0] for b in (False, True))
    (found, *_) = unlike(one, two)
    assert found.function == "layer" and "the full sizes give" in found.what


def test_an_8b_model_is_validated_small() -> None:
    """Its weights would take 16 GB; the report covers the pipeline and each set of bucket passes."""
    done: list[tuple[str, int, int]] = []
    report = verify_build(
        replace(LARGE, window=0).module(), find_cuda_target("sm_90"), 2, cuda_buckets(64, 512),
        lambda name, at, total: done.append((name, at, total)),
    )  # fmt: skip
    report.require()
    names = {v.name for v in report.verdicts}
    assert {"page_attention", "fuse_qkv", "inline_calls", "gather_early", "fuse_norm_linear"} <= names
    assert done[-1][1] == done[-1][2] and "rewrites are valid" in str(report)


def test_a_build_with_a_wrong_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compilerllm.passes.fuse_qkv_attention.fuse_qkv_attention", wrong.fuse_qkv_attention)
    report = verify_build(Decoder().module(), find_cuda_target("sm_90"), 2, cuda_buckets(8, 64))
    with pytest.raises(RewriteInvalid, match=r"fuse_qkv_attention: @main: .* = qkv_attention\("):
        report.require()


def test_recipes_over_parts_of_unknown_tensors_give_the_same_numbers_to_both_sides() -> None:
    text = """
    func @main(%x: f32[T, 8]) {
      dim T in [1, 64]
      param %w : f32[4, 8] = slice(read("packed"), axis=0, start=4, stop=8)
      %y = linear(%x, %w) : f32[T, 4]
      return %y
    }
    """
    module = parse_module(text)
    again = parse_module(text.replace('read("packed")', 'convert(read("packed"), "f32")'))
    weights = Weights(module)
    assert weights.bind(module)["w"].shape == (4, 8)
    with pytest.raises(CannotValidate, match="reads 'packed', which the module before it does not read"):
        weights.bind(again)


def test_distances() -> None:
    one = torch.tensor([1.0, float("nan"), float("inf")])
    assert distance(one, one.clone()) == 0.0
    assert distance(one, torch.tensor([1.5, float("nan"), float("inf")])) == 0.5
    for other in ([1.0, 2.0, float("inf")], [1.0, float("nan"), float("-inf")], [1.0, float("nan"), 3.0]):
        assert distance(one, torch.tensor(other)) == float("inf")
    assert distance(one, one.double()) == distance(one, one[:2]) == float("inf")


def test_relations_are_of_passes_there_are() -> None:
    assert RELATIONS.keys() <= every_pass().keys()


def test_a_finding_says_what_where_and_by_how_much() -> None:
    found = Finding(
        "p", "layer", "result 0 differs", "tails", 0.5, 0.125, ("%a = add(%b, %c)",), "model.layers.0"
    )
    assert str(found) == (
        "p: @layer: result 0 differs on inputs of kind 'tails', by 0.5 where 0.125 is allowed at %a = add(%b, %c) "
        "(from model.layers.0)"
    )
