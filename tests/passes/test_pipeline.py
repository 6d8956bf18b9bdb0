"""The list of passes and what runs it."""

import time
from pathlib import Path

import pytest

from compilerllm.ir.graph import Module
from compilerllm.ir.step import Bucket
from compilerllm.ir.text import parse_module, print_module
from compilerllm.passes.errors import UnknownPass
from compilerllm.passes.pipeline import PASSES, Options, Pass, find_pass, passes_for, run_pipeline, summary
from compilerllm.passes.plan_memory import plan_memory
from compilerllm.passes.report import NearMiss, PassReport
from compilerllm.passes.specialize import specialize
from tests.passes.captured import Decoder


def test_every_pass_says_what_it_does_and_shows_it() -> None:
    for entry in PASSES:
        assert entry.meaning
        run = entry.on_graph or entry.on_module
        module = getattr(run, "__module__", "")
        assert module.startswith("compilerllm.passes.")


def test_levels_only_add_passes() -> None:
    names = [[p.name for p in passes_for(Options(level=level))] for level in range(4)]
    assert names[0] == ["drop_batch", "canonicalise", "page_attention", "gather_rows", "float_logits"]
    assert set(names[0]) < set(names[1]) and names[1] == names[2] == names[3]


def test_what_the_pipeline_does_not_know_is_refused() -> None:
    with pytest.raises(UnknownPass, match="level 4 does not exist; the levels are 0, 1, 2, 3"):
        passes_for(Options(level=4))
    with pytest.raises(UnknownPass, match="there is no pass 'fuse'; there are add_adapters, "):
        passes_for(Options(skip=frozenset(("fuse",))))
    with pytest.raises(UnknownPass):
        find_pass("nothing")


def test_dump_has_a_file_for_each_pass_that_changed_something(tmp_path: Path) -> None:
    changed: list[str] = ["input"]
    last = [Decoder().module()]

    def note(entry: Pass, module: Module, reports: list[PassReport]) -> None:
        if module is not last[0]:
            changed.append(entry.name)
        last[0] = module

    module, _ = run_pipeline(last[0], Options(dump_ir=tmp_path / "ir"), note)
    files = sorted((tmp_path / "ir").iterdir())
    assert [f.name for f in files] == [f"{i:02d}_{name}.ir" for i, name in enumerate(changed)]
    text = files[-1].read_text()
    assert print_module(parse_module(text)) == print_module(module)
    fused = next(line for line in text.splitlines() if "= qkv_rope_write(" in line)
    assert fused.rpartition("|")[2].split()[-1] == "fuse_qkv"


def test_a_skipped_pass_leaves_its_work_undone() -> None:
    module, _ = run_pipeline(Decoder().module(), Options(skip=frozenset(("fuse_qkv",))))
    ops = [n.op for n in module.functions["layer"].nodes]
    assert "kv_write" in ops and "qkv_rope_write" not in ops


def test_a_second_run_changes_nothing() -> None:
    module, _ = run_pipeline(Decoder(qk_norm=True, bias=True).module())
    again, _ = run_pipeline(module)
    assert print_module(again) == print_module(module)


def test_origins_tell_the_passes_that_touched_a_node() -> None:
    module, _ = run_pipeline(Decoder().module())
    fused = next(n for n in module.functions["layer"].nodes if n.op == "qkv_rope_write")
    assert "fuse_qkv" in fused.origin.passes


def test_summary_adds_up_functions() -> None:
    a, b = PassReport("p", "x"), PassReport("p", "y")
    a.match(2)
    b.match()
    b.near_misses.append(NearMiss("%a = add(%b)", "no"))
    assert summary([a, b])["p"][:2] == (3, 1)


def test_a_module_without_a_language_model() -> None:
    text = """
func @main(%x: f32[N, 16]) {
  dim N in [1, 1024]
  param %w : f32[32, 16]
  param %v : f32[16, 32]
  %h = linear(%x, %w) : f32[N, 32]
  %a = gelu(%h) : f32[N, 32]
  %y = linear(%a, %v) : f32[N, 16]
  %s = tanh(%y) : f32[N, 16]
  %t = mul(%s, scalar=2.0) : f32[N, 16]
  %z = softmax(%t, axis=-1) : f32[N, 16]
  return %z
}
"""
    module, reports = run_pipeline(parse_module(text), Options(serve=False, verify=True))
    assert [n.op for n in module.main.nodes] == ["linear_act", "linear", "group"]
    assert sum(r.counts.get("groups", 0) for r in reports) == 1
    assert sum(r.counts.get("grouped nodes", 0) for r in reports) == 3


def test_an_8b_model_takes_a_fraction_of_a_second() -> None:
    """Passes run once a function, whatever the depth; all decode buckets together stay under the budget."""
    module = Decoder(layers=32, hidden=4096, heads=32, kv_heads=8, dim=128, ffn=14336, vocab=128256).module()
    start = time.perf_counter()
    module, _ = run_pipeline(module)
    for tokens in (1, 2, 4, 8, 16, 32, 64, 512):
        bucket = Bucket(tokens, tokens, tokens, 1)
        plan_memory(specialize(module, bucket), bucket)
    assert time.perf_counter() - start < 1.5
