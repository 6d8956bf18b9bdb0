"""What `compilerllm plan` answers, against what serving does with the same model and flags."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from compilerllm.building import build
from compilerllm.capacity.advice import advise, least
from compilerllm.capacity.answer import Answer, Question, answer
from compilerllm.capacity.subject import CannotPlan, DraftedSubject, Limits, model_subject
from compilerllm.cli.main import main
from compilerllm.compiler import CompileRequest
from compilerllm.config import CacheConfig, SchedulerConfig
from compilerllm.errors import KVCacheTooSmall
from compilerllm.kernels.errors import KernelError
from compilerllm.loading import load_compiled
from compilerllm.runtime.engine import InProcessEngine

MIB = 1 << 20
SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64}


@functools.cache
def drafted(place: Path, target: str) -> DraftedSubject:
    return DraftedSubject(CompileRequest(str(place), target=target, **SMALL), place)


def ask(place: Path, target: str, memory: int | None, must_hold: int | None = None) -> Answer:
    """With a process of 16 MiB on a CPU."""
    subject = drafted(place, target)
    return answer(
        subject, Question(memory, subject.limits, must_hold, base=0 if subject.on_gpu else 16 * MIB)
    )


@pytest.fixture(scope="module")
def built(llama: Path) -> Path:
    return build(CompileRequest(str(llama), **SMALL), llama)


def test_a_draft_is_the_artifact_to_the_byte(llama: Path, built: Path) -> None:
    """On a CPU: before anything is built, and from the artifact; and the loaded model's own plan."""
    request = CompileRequest(str(llama), **SMALL)
    found = model_subject(request, llama)
    assert found.folder == built and built.name[:12] in found.origin
    draft = drafted(llama, "cpu")
    assert draft.plan(draft.limits, 5) == found.plan(found.limits, 5)
    model = load_compiled(built, llama)
    own = model.memory_plan(4)  # type: ignore[union-attr]
    assert own == found.plan(found.limits, own["Python and torch"])
    # Limits that the artifact was not built with are drafted from its module.
    other = Limits(2, 32, 128)
    assert found.plan(other, 5) == draft.plan(other, 5) != draft.plan(draft.limits, 5)


def test_serving_takes_what_was_planned(llama: Path, built: Path) -> None:
    """The engine has as many blocks as the answer says, and no item of the process is larger."""
    probe = load_compiled(built, llama)
    base = probe.base_bytes  # type: ignore[union-attr]
    memory = base + 16 * MIB
    found = answer(
        model_subject(CompileRequest(str(llama), **SMALL), llama),
        Question(memory, Limits(4, 64, 128), base=base),
    )
    model = load_compiled(built, llama, memory + 64 * MIB)  # this process has grown since
    model.base_bytes = base  # type: ignore[union-attr]
    engine = InProcessEngine(
        model, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64), CacheConfig(memory=memory)
    )
    assert engine.ready.blocks_total == found.num_blocks > 0
    taken = dict(model.ledger.taken)  # type: ignore[union-attr]
    assert taken.pop("KV cache") == found.kv_bytes
    assert taken == {name: found.plan[name] for name in taken} and set(taken) > {"weights", "logits"}
    assert sum(taken.values()) + found.kv_bytes + found.plan["penalties and biases"] + base <= memory
    with pytest.raises(KVCacheTooSmall, match=r"--memory allows .*for Python and torch, .*weights"):
        InProcessEngine(model, SchedulerConfig(4, 64), CacheConfig(memory=base))
    with pytest.raises(KernelError, match=r"more than --memory allows \(1\.0 MiB\).*Python and torch"):
        load_compiled(built, llama, MIB)


def test_sizes_are_the_librarys(llama: Path, built: Path) -> None:
    """The bytes of packed weights and KV blocks, as the C++ headers lay them out."""
    import ctypes

    from compilerllm.kernels.launch.library import LAYOUTS, kv_block_bytes, packed_bytes

    model = load_compiled(built, llama)
    dll = model.library.dll  # type: ignore[union-attr]
    dll.cllm_packed_bytes.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    dll.cllm_packed_bytes.restype = dll.cllm_kv_block_bytes.restype = ctypes.c_size_t
    for layout, number in LAYOUTS.items():
        for rows, columns in ((1, 1), (16, 32), (17, 33), (4096, 14336), (130, 96)):
            assert packed_bytes(layout, rows, columns) == dll.cllm_packed_bytes(number, rows, columns)
    for dtype in ("f32", "bf16"):
        for heads, dim in ((1, 1), (2, 16), (8, 128), (3, 80)):
            assert kv_block_bytes(dtype, heads, dim) == dll.cllm_kv_block_bytes(
                int(dtype == "bf16"), heads, dim
            )


def test_a_gpus_draft_is_what_its_model_plans(llama: Path, tmp_path: Path) -> None:
    """The same program, drafted bucket by bucket and in one go, read back by the model that would run it."""
    from compilerllm.artifact import write_manifest
    from compilerllm.compiled_cuda import CudaModel
    from compilerllm.cuda_artifact import flat_module, prepare_bucket
    from compilerllm.ir.recipe import print_recipe
    from compilerllm.kernels.groups import state_entries
    from compilerllm.kernels.launch.gpu.memory import plan_model
    from compilerllm.kernels.triton.emit import draft_program, finish_program
    from compilerllm.kernels.triton.emit_sampling import draft_sampling, finish_sampling
    from compilerllm.kernels.triton.interpreted_backend import InterpretedBackend
    from compilerllm.kernels.triton.target import find_cuda_target
    from compilerllm.kernels.tuning import TunedChooser

    subject = drafted(llama, "sm_90")
    plan = subject.plan(subject.limits)
    target, buckets = find_cuda_target("sm_90"), subject.buckets(subject.limits)
    chooser = TunedChooser.for_target(target)
    program = finish_program(
        draft_program(flat_module(subject.module), buckets, target, 2, chooser, prepare_bucket)
    )
    rows = sorted({b.rows for b in buckets})
    sampling = finish_sampling(*draft_sampling(subject.vocab, rows, target, 2))
    for name, made in (("program", program), ("sampling", sampling)):
        (tmp_path / f"{name}.json").write_text(json.dumps(made.to_json()))
    parameters = [
        {"name": p.name, "dtype": p.dtype, "shape": list(p.shape), "recipe": print_recipe(p.recipe)}
        for p in subject.parameters
    ]
    manifest = write_manifest(
        tmp_path,
        {"facts": {}, "vocab_size": subject.vocab, "max_model_len": 128, "capability": 90, "target": "sm_90", "level": 2,
         "program": "program.json", "sampling": "sampling.json", "parameters": parameters, **state_entries(subject.module)},
    )  # fmt: skip
    model = CudaModel(tmp_path, manifest, InterpretedBackend())
    served = plan_model(model.sizes, 4)
    for item in served.items:
        if item.name != "kernels":  # not compiled yet
            assert plan[item.name] == item.nbytes, item.name
    assert plan["kernels"] > 0 and plan["graphs"] > 0
    assert [g.bytes_per_block for g in subject.groups] == [g.bytes_per_block for g in model.groups]


def test_fits_by_contexts_and_batches(llama: Path) -> None:
    """All of the memory in blocks; sequences of a context as the pool admits them."""
    needed = ask(llama, "cpu", None)
    block = needed.subject.kv_bytes(1)
    found = ask(llama, "cpu", needed.plan.ceiling + 8 * block)
    assert found.fits and found.longest == 128
    assert found.num_blocks == (8 * block) // sum(g.bytes_per_block for g in found.subject.groups)
    assert found.sequences_of(32) == 4, "no more than --max-num-seqs"
    assert found.sequences_of(128) == found.num_blocks // 4
    held = ask(llama, "cpu", needed.plan.ceiling + block, must_hold=128)
    assert not held.fits and "asks for 128" in held.problem and held.short_by > 0
    shorter = advise(held)
    assert shorter[0].flags == f"--max-model-len {held.longest}" and held.longest >= 32


def test_windows_hold_what_they_read(windowed: Path) -> None:
    """A group with a window holds its window and what is scheduled beyond it; both groups have as many blocks."""
    found = ask(windowed, "cpu", None)
    groups = {g.name: g for g in found.subject.groups}
    assert set(groups) == {"kv", "kv_window_40"}
    held = found.pool.blocks_by_group(128)
    assert held == {"kv": 4, "kv_window_40": 4} and found.pool.blocks_for(128) == 4
    assert found.pool.blocks_by_group(1 << 20)["kv_window_40"] == (40 + 2 * 64 - 2) // 32 + 2


def test_advice_is_the_largest_that_fits(llama: Path) -> None:
    """One more than is advised does not fit; and the memory that is said to be needed is enough, a byte less is not."""
    roomy = ask(llama, "cpu", None)
    least_with = answer(roomy.subject, roomy.question.with_limits(max_num_batched_tokens=32)).needed
    found = answer(roomy.subject, dataclasses.replace(roomy.question, memory=least_with))
    assert not found.fits and found.short_by == found.needed - least_with
    advice = dict(a.flags.split() for a in advise(found))
    assert "--max-num-batched-tokens" in advice and advice["--dtype"] == "bfloat16"
    tokens = int(advice["--max-num-batched-tokens"])
    assert 32 <= tokens < 64 and tokens % 16 == 0
    for value, fits in ((tokens, True), (tokens + 16, False)):
        again = answer(found.subject, found.question.with_limits(max_num_batched_tokens=value))
        assert again.fits is fits
    for memory, fits in ((roomy.needed, True), (roomy.needed - 4096, False)):
        assert answer(roomy.subject, dataclasses.replace(roomy.question, memory=memory)).fits is fits


def test_nothing_makes_it_fit(llama: Path) -> None:
    found = ask(llama, "cpu", 2 * MIB)
    assert not found.fits and advise(found) == [] and least(found) > 16 * MIB


def test_gpu_advice(llama: Path) -> None:
    """The context of CUDA is most of a tiny model; fewer sequences save graphs and tables."""
    roomy = ask(llama, "sm_90", None)
    fewer = answer(roomy.subject, roomy.question.with_limits(max_num_seqs=2)).needed
    found = answer(roomy.subject, dataclasses.replace(roomy.question, memory=max(fewer, roomy.needed - 1)))
    assert not found.fits and found.plan.largest.name == "CUDA context"
    assert any(a.flags.startswith("--max-num-seqs") for a in advise(found))
    fits = answer(roomy.subject, dataclasses.replace(roomy.question, memory=roomy.needed))
    assert fits.fits and fits.num_blocks > 0


def test_level_0_is_not_planned(llama: Path) -> None:
    with pytest.raises(CannotPlan, match="--optimization-level"):
        model_subject(CompileRequest(str(llama), level=0), llama)


def test_command(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 0 and 1; the table, the JSON; what is nonsense is told by the flag's name."""
    common = ["plan", str(llama), "--target", "cpu", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
    assert main([*common, "--memory", "4GiB"]) == 0
    shown = capsys.readouterr().out
    assert "It fits" in shown and "of 4,294,967,296" in shown and "Python and torch" in shown
    assert main([*common, "--memory", "4MiB", "--json"]) == 1  # no such small process
    data = json.loads(capsys.readouterr().out)
    assert data["fits"] is False and data["short_by"] == data["needed"] - 4 * MIB and data["least"] > 4 * MIB
    assert data["total"] == sum(i["bytes"] for i in data["items"])
    assert main([*common, "--memory", "lots"]) == 1
    assert "--memory must be a size such as 24GiB" in capsys.readouterr().err
