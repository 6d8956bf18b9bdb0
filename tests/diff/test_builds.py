"""Builds: passes, graphs, choices and kernels that differ; rows that add up to the step's difference."""

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from compilerllm.cli.main import main
from compilerllm.diff.builds import compare_builds, compare_keys
from compilerllm.diff.cubin import registers
from compilerllm.diff.graphs import compare_passes, compare_text
from compilerllm.diff.kernels import compare_buckets
from compilerllm.diff.sides import Side
from compilerllm.explain.report import (
    BucketReport,
    IRNode,
    Kernel,
    Launch,
    Machine,
    Miss,
    PassRun,
    Pick,
    Report,
    StepTime,
)

IR = """func @main(%x: bf16[T, 8]) {
  %y = add(%x, %x) : bf16[T, 8]  #! model.layers.0 | add | canonicalise
  return %y
}

func @layer_0(%x: bf16[T, 8]) {
  return %x
}
"""
FUSED = IR.replace("add(%x, %x)", "scale(%x, by=2.0)").replace("canonicalise", "fold_scale")


def launch(kernel: int, node: int, us: float, pick: int = -1, measured: float | None = None) -> Launch:
    return Launch(kernel, node, pick, 100.0, 200.0, us / 2, us, measured)


def report(
    texts: tuple[str, ...], passes: tuple[PassRun, ...], kernels: tuple[Kernel, ...], launches: tuple[Launch, ...],
    picks: tuple[Pick, ...] = (), step: StepTime | None = None, arena: int = 512,
) -> Report:  # fmt: skip
    nodes = tuple(
        IRNode(
            "%y = linear(...)",
            op,
            "main",
            f"model.layers.{layer}.{path}",
            layer,
            modules=(f"model.layers.{layer}.{path}",),
        )
        for layer in (0, 1)
        for op, path in (("linear", "q"), ("norm", "n"))
    )
    bucket = BucketReport("decode-1", "decode", 1, 1, 1, 256, (1, 1, 1, 1), arena, launches, measured=step)
    machine = Machine("sm_90", "H200", 4000.0, 700.0, 1.0, "typical")
    return Report("m", "id", "0.1", 2, "bf16", 2, machine, texts, passes, nodes, kernels, picks, (bucket,))


def a_pass(name: str, before: int, after: int, matches: int, misses: tuple[Miss, ...] = ()) -> PassRun:
    return PassRun(
        name, "fuse", "", before, after, matches, 0.1, {"main": matches}, {"groups": matches}, misses
    )


NORM = Kernel("norm:rows", "triton", "norm", {"block": 64}, 4, 1024, key="aa")
SLOW = Kernel("linear:tile", "triton", "linear", {"bm": 64}, 4, 2048, key="bb")
FAST = Kernel("linear:tile", "triton", "linear", {"bm": 128}, 8, 4096, key="cc")
MISS = Miss("main", "%y", "the dtype is f32", "model.layers.1.q")
PICK = Pick("linear", "M=1", {"bm": 64}, "cost model")
OLD = report((IR, IR), (a_pass("fold_scale", 0, 1, 0, (MISS,)),), (NORM, SLOW),
             (launch(1, 0, 10.0, 0), launch(0, 1, 2.0), launch(1, 2, 10.0, 0), launch(0, 3, 2.0)), (PICK,))  # fmt: skip
NEW = report((IR, FUSED), (a_pass("fold_scale", 0, 1, 2),), (FAST,), (launch(0, 0, 7.0, 0), launch(0, 2, 7.0, 0)),
             (dataclasses.replace(PICK, config={"bm": 128}, why="timed", us=6.5),), arena=256)  # fmt: skip


def test_passes() -> None:
    (change,) = compare_passes(OLD, NEW)
    assert (change.name, change.matches, change.counts) == ("fold_scale", (0, 2), {"groups": (0, 2)})
    assert change.gone == ("@main model.layers.*.q: the dtype is f32",) and change.appeared == ()
    assert compare_passes(OLD, OLD) == []


def test_graphs_by_function() -> None:
    """A function that is equal is left out, and so are origins."""
    (change,) = compare_text(IR, FUSED)
    assert (change.name, change.what, change.added, change.removed) == ("main", "changed", 1, 1)
    assert any(line.startswith("+  %y = scale") for line in change.lines) and "#!" not in "".join(
        change.lines
    )
    assert compare_text(IR, IR.replace("canonicalise", "other")) == []
    (gone,) = compare_text(IR, IR[: IR.index("func @layer_0")])
    assert (gone.name, gone.what) == ("layer_0", "removed")


def test_kernels_add_up_to_the_step() -> None:
    """Layers are one row; what changed is told by field; rows sum to the step."""
    ((bucket,), only_old, only_new) = compare_buckets(OLD, NEW)
    assert not only_old and not only_new and not bucket.measured
    rows = {k.op: k for k in bucket.kernels}
    assert rows["norm"].what == "removed" and rows["norm"].us_delta == -4.0
    assert rows["linear"].what == "changed" and rows["linear"].us_delta == -6.0
    assert rows["linear"].differs() == {
        "config.bm": (64, 128), "warps": (4, 8), "shared memory": (2048, 4096), "code": ("bb", "cc"),
    }  # fmt: skip
    assert bucket.delta == -10.0 == sum(k.us_delta for k in bucket.kernels)
    assert (bucket.arena_old, bucket.arena_new) == (512, 256)


def measured(source: Report, times: list[float], wall: float, waking: float) -> Report:
    (bucket,) = source.buckets
    launches = tuple(
        dataclasses.replace(x, measured_us=us) for x, us in zip(bucket.launches, times, strict=True)
    )
    step = StepTime(wall, sum(times), wall - sum(times) - waking, 24, {"waking": waking})
    return dataclasses.replace(
        source, buckets=(dataclasses.replace(bucket, launches=launches, measured=step),)
    )


def test_measured_rows_add_up_to_the_measured_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernel by kernel, with what is in no kernel: all of the step's difference is explained."""
    old, new = measured(OLD, [11.0, 2.5, 12.0, 2.5], 31.0, 1.0), measured(NEW, [9.0, 9.5], 34.0, 2.0)
    ((bucket,), *_) = compare_buckets(old, new)
    assert bucket.measured and bucket.delta == pytest.approx(3.0)
    rows = sum(k.us_delta for k in bucket.kernels) + sum(b - a for _, a, b in bucket.others)
    assert rows == pytest.approx(bucket.delta)
    assert {n: (a, b) for n, a, b in bucket.others}["in no kernel"] == pytest.approx((2.0, 13.5))
    files = []
    for name, side in (("old", old), ("new", new)):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(side.to_json()))
    out = tmp_path / "diff.json"
    assert main(["diff", *map(str, files), "--json", str(out)]) == 1, "9.7% slower"
    assert main(["diff", *map(str, files), "--fail-above", "10%"]) == 0
    shown = capsys.readouterr().out
    assert "measured steps are slower by more than 3.0%: decode-1" in shown and "in no kernel" in shown
    data = json.loads(out.read_text())
    (told,) = data["buckets"]
    assert sum(k["us_delta"] for k in told["kernels"]) + sum(
        o["us_delta"] for o in told["others"]
    ) == pytest.approx(3.0)


def test_choices_and_whole_builds() -> None:
    found = compare_builds(Side("old", report=OLD), Side("new", report=NEW))
    (pick,) = found.picks
    assert (
        pick.old is not None and pick.new is not None and (pick.old.why, pick.new.us) == ("cost model", 6.5)
    )
    assert found.passes and found.functions and found.buckets and not found.identical
    same = compare_builds(Side("old", report=OLD), Side("new", report=OLD))
    assert not (same.passes or same.functions or same.picks or any(b.changed for b in same.buckets))


def test_keys() -> None:
    def manifest(**fields: Any) -> dict[str, Any]:
        return {"key": {"fields": fields}}

    assert compare_keys(manifest(dtype="f32", level=2), manifest(dtype="bf16", level=2, more=1)) == [
        ("dtype", "f32", "bf16"), ("more", None, 1)
    ]  # fmt: skip


def test_a_result_and_a_build_are_no_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_text(json.dumps(OLD.to_json()))
    (tmp_path / "result.jsonl").write_text(json.dumps({"benchmark": "x", "seconds": 1.0}) + "\n")
    assert main(["diff", str(tmp_path / "report.json"), str(tmp_path / "result.jsonl")]) == 2
    assert "give two of one kind" in capsys.readouterr().err


def test_registers_of_a_real_cubin(tmp_path: Path) -> None:
    """Against what NVIDIA's own tool says, where Triton brings it."""
    triton = pytest.importorskip("triton")
    from compilerllm.kernels.triton.build import compile_source
    from compilerllm.kernels.triton.source import KernelSource, generated
    from tests.kernels.gpu.tiny import KERNELS, TEXT, VOCAB

    types, _ = KERNELS["read"]
    source = KernelSource.of(
        f"{generated(TEXT)}:read", types, {"V": VOCAB, "PDL": False}, num_warps=1, pdl=False
    )
    code, _ = compile_source(source, 90)
    (tmp_path / "k.cubin").write_bytes(code)
    found = registers(tmp_path / "k.cubin")
    assert found is not None and 8 <= found <= 255
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if tool.exists():
        said = subprocess.run(
            [tool, "--dump-resource-usage", tmp_path / "k.cubin"], capture_output=True, text=True, check=True
        ).stdout
        assert f"REG:{found} " in said
    assert registers(tmp_path / "none.cubin") is None
    (tmp_path / "text.cubin").write_text("no ELF")
    assert registers(tmp_path / "text.cubin") is None
