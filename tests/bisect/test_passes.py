"""Faults put into passes, one at a time: the verdict must name the pass, and the node that it made wrong."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from compilerllm.bisect.report import Report
from compilerllm.ir.graph import Graph, Module, Node, Param
from compilerllm.ir.recipe import Concat
from compilerllm.ir.text import parse_module
from compilerllm.passes import pipeline
from compilerllm.passes.pipeline import PASSES, Pass
from compilerllm.passes.report import PassReport
from tests.bisect.subjects import bisect, subject
from tests.passes.captured import Decoder

Change = Callable[[Node], Node | None]


def rewrite(graph: Graph, change: Change) -> Graph:
    """Every node for which ``change`` gives another is replaced by that."""
    return replace(graph, nodes=tuple(change(n) or n for n in graph.nodes))


def break_pass(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Graph], Graph]) -> None:
    """The pass ``name`` is followed, within itself, by a change of what it makes."""

    def broken(entry: Pass) -> Pass:
        if entry.name != name:
            return entry
        if entry.on_graph is not None:
            run = entry.on_graph

            def on_graph(graph: Graph, report: PassReport) -> Graph:
                made = run(graph, report)
                return made if made is graph else change(made)

            return dataclasses.replace(entry, on_graph=on_graph)
        on_module = entry.on_module
        assert on_module is not None

        def changed(module: Module, report: PassReport, options: pipeline.Options) -> Module:
            made = on_module(module, report, options)
            return made if made is module else made.with_functions(*map(change, made.functions.values()))

        return dataclasses.replace(entry, on_module=changed)

    monkeypatch.setattr(pipeline, "PASSES", tuple(map(broken, PASSES)))


def found(report: Report, name: str) -> None:
    assert report.verdict.kind == "pass", report.verdict.text
    assert report.verdict.pass_name == name, report.verdict.text
    assert name in report.text() and not report.right


def test_residual_dropped_by_fuse_add_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(node: Node) -> Node | None:
        if node.op != "add_rms_norm" or node.operand(2).name != "post_attention_layernorm.weight":
            return None
        return replace(node, inputs=(node.inputs[0], node.inputs[0], *node.inputs[2:]))

    break_pass(monkeypatch, "fuse_add_norm", lambda graph: rewrite(graph, drop))
    report = bisect(subject(Decoder().module()))
    found(report, "fuse_add_norm")
    assert report.verdict.path == "model.layers.0" and report.verdict.function == "layer"
    assert "= add_rms_norm(" in report.verdict.node and "post_attention" in report.verdict.node
    assert report.verdict.skippable and "--skip-passes fuse_add_norm" in report.verdict.remedy


def test_rotary_halves_swapped_by_fuse_qkv(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values go to the cache and nowhere else: what is stored is compared too."""

    def swap(node: Node) -> Node | None:
        if node.op != "qkv_rope_write":
            return None
        state, qkv, step, cos, sin, *norms = node.inputs
        return replace(node, inputs=(state, qkv, step, sin, cos, *norms))

    break_pass(monkeypatch, "fuse_qkv", lambda graph: rewrite(graph, swap))
    report = bisect(subject(Decoder(qk_norm=True).module()))
    found(report, "fuse_qkv")
    assert report.verdict.path == "model.layers.0"
    assert "= qkv_rope_write(" in report.verdict.node and report.verdict.skippable


def test_wrong_order_by_pack_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    def reverse(param: Param) -> Param:
        recipe = param.recipe
        if not isinstance(recipe, Concat) or "gate_proj" not in param.name:
            return param
        return replace(param, recipe=Concat(recipe.sources[::-1], recipe.axis))

    def change(graph: Graph) -> Graph:
        return replace(graph, params=tuple(map(reverse, graph.params)))

    break_pass(monkeypatch, "pack_projections", change)
    report = bisect(subject(Decoder().module()))
    found(report, "pack_projections")
    assert report.verdict.path == "model.layers.0" and "gated_act" in report.verdict.node
    assert any("gate_proj_up_proj" in node for node in report.verdict.made), report.verdict.text
    assert report.verdict.skippable


def test_wrong_factor_by_fold_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is stored wrong, no name tells: one number of one attention is."""

    def scale(node: Node) -> Node | None:
        if node.op != "attention":
            return None
        return replace(node, attrs={**node.attrs, "scale": 4 * node.number("scale")})

    text = Decoder().text()
    text = text.replace(
        "  %a = attention(%qa,", "  %qs = mul(%qa, scalar=0.5) : bf16[T, 4, 8]\n  %a = attention(%qs,"
    )
    break_pass(monkeypatch, "fold_scale", lambda graph: rewrite(graph, scale))
    report = bisect(subject(parse_module(text)))
    found(report, "fold_scale")
    assert "= attention(" in report.verdict.node and report.verdict.path == "model.layers.0"
    assert report.verdict.skippable


def test_wrong_number_by_an_early_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def scale(node: Node) -> Node | None:
        if node.op != "mul" or "scalar" not in node.attrs:
            return None
        return replace(node, attrs={**node.attrs, "scalar": 0.25})

    break_pass(monkeypatch, "raise_gated_act", lambda graph: rewrite(graph, scale))
    report = bisect(subject(Decoder(factor=0.22).module()))
    found(report, "raise_gated_act")
    assert "= mul(" in report.verdict.node and report.verdict.path.startswith("model.layers.0")


def test_window_lost_by_page_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of level 0: O0 has the fault too, and serving cannot do without it."""

    def forget(node: Node) -> Node | None:
        if node.op != "paged_attention":
            return None
        return replace(node, attrs={k: v for k, v in node.attrs.items() if k != "window"})

    break_pass(monkeypatch, "page_attention", lambda graph: rewrite(graph, forget))
    report = bisect(subject(Decoder(window=4).module()))
    found(report, "page_attention")
    assert not report.verdict.skippable and "--skip-passes" not in report.verdict.remedy


def test_wrong_rows_by_gather_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last pass before the head: layers are right, so the node is main's."""

    def change(graph: Graph) -> Graph:
        def take(node: Node) -> Node | None:
            if node.op != "rms_norm" or graph.name != "main":
                return None
            return replace(node, attrs={**node.attrs, "eps": 50.0})

        return rewrite(graph, take)

    break_pass(monkeypatch, "gather_rows", change)
    report = bisect(subject(Decoder().module()))
    found(report, "gather_rows")
    assert report.verdict.function == "main"


@pytest.mark.parametrize(
    "decoder",
    [Decoder(), Decoder(bias=True), Decoder(packed=True), Decoder(window=4), Decoder(dtype="f32", qk_norm=True), Decoder(weights="q8_0")],
    ids=["llama", "bias", "packed", "window", "f32", "q8_0"],
)  # fmt: skip
def test_right_graphs_are_right(decoder: Decoder) -> None:
    report = bisect(subject(decoder.module()))
    assert report.right, report.text()
    assert report.verdict.text.startswith("right.")


def test_a_mixture_of_experts_is_right() -> None:
    """As transformers has it: routing may fall the other way in bf16, which the yardstick shows too."""
    from tests.models.tiny import captured

    module = captured("qwen3_moe", torch.bfloat16).module
    report = bisect(subject(module))
    assert report.right, report.text()
