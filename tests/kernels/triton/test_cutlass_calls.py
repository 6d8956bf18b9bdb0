"""CUTLASS among a linear's candidates: when it is offered, what its calls hold, and what a build makes of them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compilerllm.artifact import cutlass_line
from compilerllm.ir.step import Bucket
from compilerllm.ir.text import parse_module
from compilerllm.kernels.cutlass import build
from compilerllm.kernels.cutlass.build import find_supply
from compilerllm.kernels.cutlass.candidates import candidates, gated_candidates
from compilerllm.kernels.cutlass.supply import NONE, Supply
from compilerllm.kernels.errors import ArtifactError, BuildFailed, UnsupportedByTarget
from compilerllm.kernels.kept import keep
from compilerllm.kernels.launch.gpu import cutlass
from compilerllm.kernels.launch.gpu.libraries import MAKERS, LibraryCall
from compilerllm.kernels.launch.gpu.program import Addresses, Program, arguments
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.kernels.triton import interpret, tune
from compilerllm.kernels.triton.emit import (
    ProgramDraft,
    build_program,
    cutlass_cache,
    draft_program,
    finish_program,
)
from compilerllm.kernels.triton.target import find_cuda_target
from compilerllm.kernels.triton.tasks import find_tasks
from tests.kernels.reference.steps import random_inputs, random_params
from tests.kernels.triton.harness import KERNELS, NATIVE, assert_close, run_module

ALL = Supply(builds=True)
ROWS, N, K = 64, 48, 32
NAMES = [i.name for i in candidates(ROWS, N, K)]
OPS = {
    "linear": "%y = linear(%x, %w) : bf16[T, 48]",
    "bias": "%y = linear(%x, %w, %b) : bf16[T, 48]",
    "act": '%y = linear_act(%x, %w, %b, act="gelu_tanh") : bf16[T, 48]',
    "add": "%y = linear_add(%x, %w, %r, %b) : bf16[T, 48]",
    "gated": '%y = linear_gated(%x, %w, act="silu") : bf16[T, 24]',
    "gated, bias": '%y = linear_gated(%x, %w, %b, act="silu") : bf16[T, 24]',
}


class Take:
    """Takes the CUTLASS candidate of a place; notes what there was."""

    def __init__(self, place: int = 0) -> None:
        self.place = place
        self.seen: list[dict[str, Any]] = []

    def choose(
        self, family: str, problem: Mapping[str, int | str], found: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        self.seen = list(found)
        offered = [c for c in found if c["path"] == "cutlass"]
        return offered[self.place] if offered else found[0]


def module_text(line: str, dtype: str = "bf16", n: int = N, k: int = K) -> str:
    inputs = [f"%x: bf16[T, {k}]"] + [f"%r: bf16[T, {n}]"] * ("%r" in line)
    text = f"""func @main({", ".join(inputs)}) {{
      dim T in [1, 64]
      param %w : bf16[{n}, {k}]
      param %b : bf16[{n}]
      {line}
      return %y
    }}"""
    return text.replace("bf16", dtype)


def drafted(
    text: str, rows: int = ROWS, supply: Supply = ALL, level: int = 3, target: str = "sm_90"
) -> tuple[ProgramDraft, Take]:
    chooser = Take()
    bucket = Bucket(rows, 1, 1, rows)
    made = draft_program(
        parse_module(text), [bucket], find_cuda_target(target), level, chooser, cutlass=supply
    )
    return made, chooser


def offered(text: str, **options: Any) -> list[str]:
    return [c["instance"] for c in drafted(text, **options)[1].seen if c["path"] == "cutlass"]


def test_offered_after_cublas_where_it_may_be_timed() -> None:
    plain = module_text(OPS["linear"])
    assert offered(plain) == NAMES
    paths = [c["path"] for c in drafted(plain)[1].seen]
    assert paths.index("cublas") + 1 == paths.index("cutlass")
    assert all("_bias" in n for n in offered(module_text(OPS["act"])))
    assert offered(plain, rows=63) == offered(plain, level=2) == offered(plain, target="sm_100") == []
    assert offered(plain, supply=NONE) == []
    assert offered(plain, supply=Supply(kept=frozenset(NAMES[1:2]))) == NAMES[1:2]
    assert offered(module_text(OPS["linear"], "f16")) == []
    gated = [i.name for i in gated_candidates(ROWS, N // 2, K, "silu")]
    assert offered(module_text(OPS["gated"])) == gated + NAMES
    assert offered(module_text(OPS["gated"]).replace("silu", "relu")) == NAMES
    assert offered(module_text(OPS["gated, bias"])) == offered(module_text(OPS["bias"]))
    float_out = module_text('%y = linear(%x, %w, out_dtype="f32") : f32[T, 48]')
    assert offered(float_out) == []
    assert offered(module_text("%y = linear(%x, %w) : bf16[T, 44]", n=44)) == []
    large = [i.name for i in candidates(2048, N, K)]
    assert offered(plain, rows=2048) == large != NAMES


def gate(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(first).to(torch.bfloat16).float() * second


def product(call: LibraryCall) -> Any:
    """What an instance computes, by torch, from the call's arguments in their order."""
    n, k, m = int(call.fixed["n"]), int(call.fixed["k"]), int(call.values[7])
    halves = 2 if call.fixed["gated"] else 1
    a, b, out = call.operand(0, (m, k)), call.operand(1, (halves * n, k)), call.operand(5, (m, n))
    assert call.values[2] == call.values[4] == call.values[6] == 0
    if halves == 2:
        assert call.fixed["activation"] == "silu" and not call.values[3]
        return lambda: out.copy_(gate(*(a.float() @ b.float().t()).to(out.dtype).float().chunk(2, 1)))
    bias = call.operand(3, (n,)).float() if call.values[3] else torch.zeros(())
    assert bool(call.values[3]) == call.fixed["bias"]
    return lambda: out.copy_(a.float() @ b.float().t() + bias)


@pytest.mark.parametrize("op", OPS)
def test_calls_and_what_follows_them_give_the_linear(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAKERS, "cutlass_gemm", product)
    monkeypatch.setattr(interpret, "_ON_CPU", ("cutlass_gemm",))
    torch.manual_seed(0)
    module = parse_module(module_text(OPS[op]))
    params, inputs = random_params(module), random_inputs(module, {"T": ROWS})
    (want,) = Interpreter(module, params).run(*inputs)
    program = finish_program(drafted(module_text(OPS[op]))[0])
    arena = torch.full((max(program.plans[0].arena_bytes, 1),), 0xFF, dtype=torch.uint8)
    got = torch.full_like(want, float("nan"))
    where = Addresses(
        {n: p.data_ptr() for n, p in params.items()}, {},
        {f"input_{i}": t.data_ptr() for i, t in enumerate(inputs)}, arena.data_ptr(), got.data_ptr(),
    )  # fmt: skip
    templates = []
    for launch in program.plans[0].launches:
        kernel = program.kernels[launch.kernel]
        templates.append(kernel.template)
        values, grid = arguments(launch, where, {"T": ROWS})
        interpret.run_kernel(kernel, grid, values)
    whole = op in ("linear", "bias", "gated")
    assert templates == ["library:cutlass_gemm"] + ["after:after"] * (not whole)
    assert_close(got, want)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("op", ["linear", "gated", "gate inside"])
def test_on_the_gpu(op: str, place: int) -> None:
    supply, rows = find_supply(cutlass_cache(KERNELS)), 200
    instance = (gated_candidates(rows, 96, 136, "silu") if "inside" in op else candidates(rows, 192, 136))[
        place
    ]
    if not NATIVE or not supply.has(instance):
        pytest.skip(supply.reason or "needs an H100 or H200")
    text = (
        module_text(OPS[op.replace("gate inside", "gated")], n=192, k=136)
        .replace("48]", "192]")
        .replace("24]", "96]")
    )
    text = text.replace("[1, 64]", "[1, 1024]")
    torch.manual_seed(0)
    module = parse_module(text)
    params, inputs = random_params(module), random_inputs(module, {"T": rows})
    (want,) = Interpreter(module, params).run(*inputs)
    only = Supply(kept=frozenset((instance.name,)))
    (got,) = run_module(text, params, inputs, chooser=Take(), level=3, cutlass=only)
    assert_close(got, want)


def c_names(function: str) -> list[str]:
    """Names of the parameters of a function of the C ABI."""
    text = (build.TEMPLATES / "table.cpp.in").read_text()
    found = re.search(rf"^int {function}\((.*?)\) {{", text, re.S | re.M)
    assert found is not None
    return [p.split()[-1].lstrip("*") for p in found.group(1).split(",")]


@dataclass
class Recorder:
    """A library that notes calls by the C ABI's names."""

    names: tuple[str, ...]
    wanted: int = 0

    def __post_init__(self) -> None:
        self.calls: list[dict[str, int]] = []

    def workspace_size(self, *sizes: int) -> int:
        return self.wanted

    def run(self, *values: int) -> int:
        self.calls.append(dict(zip(c_names("run"), values, strict=True)))
        return 0

    def run_grouped(self, *values: int) -> int:
        self.calls.append(dict(zip(c_names("run_grouped"), values, strict=True)))
        return 0


def recorded(monkeypatch: pytest.MonkeyPatch, names: Sequence[str], wanted: int = 0) -> Recorder:
    recorder = Recorder(tuple(names), wanted)
    library = object.__new__(cutlass.CutlassLibrary)
    library._library, library.names = recorder, recorder.names  # type: ignore[assignment]
    monkeypatch.setattr(cutlass, "load", lambda path: library)
    return recorder


def call_of(program: Program, place: int = 0, rows: int = ROWS) -> LibraryCall:
    launch = program.plans[0].launches[place]
    where = Addresses({"w": 1024, "b": 2048}, {}, {"input_0": 4096}, 8192, 16384)
    values, _ = arguments(launch, where, {"T": rows})
    kernel = program.kernels[launch.kernel]
    return LibraryCall(kernel, tuple(values), {"T": rows}, lambda *_: torch.empty(0), Path("artifact"), 99)


def test_arguments_reach_the_c_abi_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, _ = drafted(module_text(OPS["bias"]))
    (instance,) = draft.instances()
    program = Program.from_json(json.loads(json.dumps(finish_program(draft, {}, "lib").to_json())))
    recorder = recorded(monkeypatch, ["another", instance.name])
    cutlass.cutlass_gemm(call_of(program))()
    assert recorder.calls == [
        {"instance": 1, "a": 4096, "b": 1024, "c": 0, "bias": 2048, "d": 16384, "m": ROWS, "n": N, "k": K, "scales": 0,
         "workspace": 0, "workspace_bytes": 0, "stream": 99}
    ]  # fmt: skip
    assert cutlass.cutlass_gemm(call_of(program, rows=0))() is None and len(recorder.calls) == 1
    with pytest.raises(ArtifactError, match="Build the artifact again"):
        recorded(monkeypatch, ["another"])
        cutlass.cutlass_gemm(call_of(program))
    with pytest.raises(ArtifactError, match="256 bytes of workspace here, the artifact keeps 0"):
        recorded(monkeypatch, [instance.name], wanted=256)
        cutlass.cutlass_gemm(call_of(program))


def no_tools() -> tuple[str, str]:
    raise BuildFailed("nvcc not found")


def kept_library(folder: Path, n: int = N) -> Path:
    """What a build elsewhere leaves in a cache, but for the code."""
    folder.mkdir(parents=True)
    made = [{"config": i.config(), "text": build.text_key(i.source())} for i in candidates(ROWS, n, K)]
    made.append({"config": made[0]["config"] | {"schedule": "another version's"}, "text": "?"})  # type: ignore[operator]
    described = {"instances": made, "tools": {"nvcc": "release 13.0", "cutlass": "4.2"}}
    (folder / "0123.json").write_text(json.dumps(described))
    (folder / "made").write_bytes(b"code")
    keep(folder / "made", folder / "0123.so")
    return folder / "0123.so"


def test_a_build_without_nvcc_takes_the_caches_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "compiler", no_tools)
    empty = build.find_supply(tmp_path / "cutlass")
    assert empty == Supply(False, frozenset(), "nvcc not found")
    library = kept_library(tmp_path / "cutlass")
    supply = build.find_supply(tmp_path / "cutlass")
    assert supply == Supply(False, frozenset(NAMES), "nvcc not found")
    built = build_program(drafted(module_text(OPS["linear"]), supply=supply)[0], tmp_path)
    assert built.library == library and not built.cubins
    assert dict(built.program.kernels[0].constexprs)["library"] == "0123"
    biased = drafted(module_text(OPS["bias"]))[0]
    with pytest.raises(BuildFailed, match="_bias: nvcc not found"):
        build_program(biased, tmp_path)


def test_instances_of_other_sources_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", no_tools)
    kept_library(tmp_path / "cutlass")
    monkeypatch.setattr(build, "FLAGS", ("-O1",))
    assert build.find_supply(tmp_path / "cutlass").kept == frozenset()


def test_tuning_times_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", no_tools)
    target = find_cuda_target("sm_90")
    (task,) = find_tasks(
        parse_module(module_text(OPS["linear"])), [Bucket(ROWS, 1, 1, ROWS)], target, 3, cutlass=ALL
    )
    offered = [c for c in task.candidates if c["path"] == "cutlass"]
    drafts = [task.draft(c, target, 3, ALL) for c in offered]
    assert [d.instances()[0].name for d in drafts] == NAMES
    said: list[str] = []
    assert tune._build_library(drafts, tmp_path, lambda done, total, what: said.append(what)) == ""
    assert said[-1].startswith("left out: CUTLASS kernels")
    kept_library(tmp_path / "cutlass")
    assert tune._build_library(drafts, tmp_path, lambda *_: None) == "0123"
    assert tune._build_library([task.draft(task.candidates[0], target, 3, ALL)], tmp_path, print) == ""


def test_an_instance_of_other_data_is_refused_by_name() -> None:
    class Other:
        def choose(self, family: str, problem: object, found: object) -> dict[str, Any]:
            return {"path": "cutlass", "instance": "gemm_of_old"}

    bucket = Bucket(ROWS, 1, 1, ROWS)
    with pytest.raises(UnsupportedByTarget, match="no kernel gemm_of_old for this product; there are gemm_"):
        draft_program(
            parse_module(module_text(OPS["linear"])), [bucket], find_cuda_target("sm_90"), 3, Other(), cutlass=ALL
        )  # fmt: skip


def test_cards_say_what_is_called_or_why_nothing_is() -> None:
    assert cutlass_line({}) == ""
    assert cutlass_line({"cutlass": {"instances": [], "left_out": "nvcc not found"}}) == (
        "candidates left out: nvcc not found"
    )
    assert cutlass_line({"cutlass": {"instances": ["a", "b"], "left_out": ""}}) == "a, b"


def test_buckets_share_one_library() -> None:
    module = parse_module(module_text(OPS["linear"]).replace("[1, 64]", "[1, 16384]"))
    buckets = [Bucket(64, 1, 1, 64), Bucket(16384, 1, 1, 16384)]
    draft = draft_program(module, buckets, find_cuda_target("sm_90"), 3, Take(), cutlass=ALL)
    made = draft.instances()
    assert [i.name for i in made] == sorted(i.name for i in made) and len(made) == 2
    assert replace(draft, buckets=draft.buckets[:1]).instances() != made
