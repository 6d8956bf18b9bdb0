"""Choices left to the machine that serves: every candidate that a program ships is right, whichever is picked."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from compilerllm.ir.step import Bucket
from compilerllm.ir.text import parse_module
from compilerllm.kernels.launch.gpu.program import NO_COST, Pointer, Program
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.kernels.triton.emit import draft_program, finish_program
from compilerllm.kernels.triton.emitter import FirstCandidate
from compilerllm.kernels.triton.target import find_cuda_target
from compilerllm.kernels.tuning import TunedChooser, TuningData, problem_key
from tests.kernels.reference.steps import random_inputs, random_params
from tests.kernels.triton.harness import Machine, assert_close
from tests.kernels.triton.test_linear import PATHS, TILE, module_text

TARGET = find_cuda_target("sm_90")
Candidate = dict[str, Any]
CUBLAS = {"path": "cublas"}


class Offer(FirstCandidate):
    """Leaves every choice open, among the same candidates; of a norm apart where they do not norm."""

    def __init__(self, *candidates: Candidate) -> None:
        self.candidates = candidates

    def offer(
        self, family: str, problem: Mapping[str, int | str], candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        return self.candidates


def outcomes(text: str, chooser: Any, tokens: int) -> tuple[Machine, list[torch.Tensor], list[torch.Tensor]]:
    """A machine with the whole program, its inputs, and what the reference gives."""
    torch.manual_seed(0)
    module = parse_module(text)
    params, inputs = random_params(module), random_inputs(module, {"T": tokens})
    want = Interpreter(module, params).run(*inputs)
    machine = Machine(module, params, [Bucket(tokens, 1, 1, tokens)], chooser=chooser)
    return machine, list(inputs), list(want)


def run_every_pick(text: str, chooser: Any, tokens: int) -> Program:
    """Every combination of candidates, each against the reference, on an arena that was poisoned before."""
    machine, inputs, want = outcomes(text, chooser, tokens)
    whole = Program.from_json(json.loads(json.dumps(machine.program.to_json())))
    assert whole == machine.program
    for picks in itertools.product(*(range(len(c.configs)) for c in whole.choices)):
        machine.program = whole.picked(picks)
        machine.arena.fill_(0xFF)
        for a, b in zip(machine.run(0, None, inputs), want, strict=True):
            assert_close(a, b, 100.0 if a.dtype == torch.float32 else 1.0)
    return whole


@pytest.mark.parametrize("op", ["add", "gated, bias"])
def test_every_candidate_is_right(op: str) -> None:
    """One launch or two, with scratch of their own and counters or without."""
    chooser = Offer(PATHS["matmul"], PATHS["split"], CUBLAS, PATHS["skinny"])
    whole = run_every_pick(module_text(op, "bf16"), chooser, 3)
    (choice,) = whole.choices
    assert (choice.family, len(choice.configs)) == ("linear", 4)
    counts = [len(whole.picked([i]).plans[0].launches) for i in range(4)]
    assert counts == [1, 1, 2, 1] and len(whole.plans[0].launches) == 5
    assert len(whole.picked([2]).kernels) == 2, "kernels of other candidates stayed"


def test_the_norm_may_be_apart_or_inside() -> None:
    chooser = Offer(PATHS["norm"], TILE | {"bm": 16, "bn": 32, "bk": 32, "norm": "apart"})
    whole = run_every_pick(module_text("norm, gated", "bf16"), chooser, 2)
    assert [len(whole.picked([i]).plans[0].launches) for i in (0, 1)] == [1, 2]


COPIED = """func @main(%q: bf16[T, 96]) {
  dim T in [1, 8]
  param %w : bf16[32, 64]
  param %v : bf16[32, 64]
  %x = slice(%q, axis=1, start=0, stop=64) : bf16[T, 64]
  %y = linear(%x, %w) : bf16[T, 32]
  %z = linear_add(%x, %v, %y) : bf16[T, 32]
  return %z
}"""


def test_a_copy_that_the_default_wants_is_made_whatever_is_picked() -> None:
    """A library reads dense rows: its operand is copied once, and the next node reads the copy too."""
    whole = run_every_pick(COPIED, Offer(CUBLAS, PATHS["matmul"]), 3)
    assert len(whole.choices) == 2
    templates = [whole.kernels[x.kernel].template for x in whole.plans[0].launches if x.pick is None]
    assert len(templates) == 1 and not templates[0].startswith(("matmul", "library")), templates


def test_a_candidate_that_alone_wants_a_copy_is_left_out() -> None:
    """As if it had never been offered; the others stay."""
    several = [PATHS["matmul"], CUBLAS, PATHS["split"]]
    whole = run_every_pick(COPIED, Offer(*several), 3)
    assert [c.configs for c in whole.choices] == [(PATHS["matmul"], PATHS["split"])] * len(whole.choices)
    alone = draft_program(parse_module(COPIED), [Bucket(3, 1, 1, 3)], TARGET, 2, Offer(*several[::2]))
    assert finish_program(alone) == whole
    single = draft_program(parse_module(COPIED), [Bucket(3, 1, 1, 3)], TARGET, 2, Offer(*several[:2]))
    assert not finish_program(single).choices


def test_costs_are_counted_once_and_picks_are_forgotten() -> None:
    """A node's cost stands at its first launch in every picked program."""
    module = parse_module(COPIED)
    bucket = [Bucket(4, 1, 1, 4)]
    alone = finish_program(draft_program(module, bucket, TARGET))
    whole = finish_program(draft_program(module, bucket, TARGET, 2, Offer(CUBLAS, PATHS["matmul"])))
    bytes_alone = sum(x.cost.nbytes for x in alone.plans[0].launches)
    for picks in itertools.product((0, 1), repeat=2):
        launches = whole.picked(picks).plans[0].launches
        assert sum(x.cost.nbytes for x in launches) == pytest.approx(bytes_alone)
        assert {x.pick for x in launches} == {None}
        first = {x.node: x for x in reversed(launches)}
        assert all(x.cost != NO_COST for x in first.values())


def test_scratch_of_candidates_is_shared_and_held_while_the_node_runs() -> None:
    """The arena of several candidates is that of the one that wants most; nothing of a live value is in it."""
    text = module_text("add", "bf16")
    split, small = PATHS["split"], PATHS["matmul"]

    def arena(*candidates: Candidate) -> int:
        draft = draft_program(parse_module(text), [Bucket(16, 1, 1, 16)], TARGET, 2, Offer(*candidates))
        return finish_program(draft).plans[0].arena_bytes

    assert arena(split, CUBLAS | {}) == max(arena(split), arena(CUBLAS)) == arena(CUBLAS, split)
    assert arena(small, split) == arena(split)


def test_only_what_no_figure_knows_is_left_open() -> None:
    """Exact or near figures decide; the rest is offered in the cost model's order."""
    data = TuningData("H200")
    known = {"M": 8, "N": 4}
    data.add("linear", known, {"path": "b"}, 1.0)
    chooser = TunedChooser(data, most=2)
    found = [{"path": p} for p in "abc"]
    assert chooser.offer("linear", known, found) == [{"path": "b"}]
    assert chooser.offer("linear", known | {"M": 6}, found) == [{"path": "b"}]
    assert chooser.offer("linear", known | {"N": 5}, found) == found[:2]
    assert chooser.report()[-1]["problem"] == problem_key(known | {"N": 5})
    assert TunedChooser(data).offer("linear", {"N": 5}, found) == found[:1]


def test_kernels_before_their_wait_read_parameters_whatever_is_picked(tmp_path: Any) -> None:
    """The proof is of every launch that the program ships, so that no combination is left out."""
    from compilerllm.kernels.triton.build import build_kernels

    draft = draft_program(
        parse_module(module_text("add", "bf16")), [Bucket(3, 1, 1, 3)], TARGET, 2, Offer(PATHS["gemv"], PATHS["skinny"])
    )  # fmt: skip
    cubins = build_kernels(draft.sources(), TARGET, tmp_path, workers=1)
    whole = finish_program(draft, cubins)
    early = [(x, [x.args[i] for i in whole.kernels[x.kernel].early]) for x in whole.plans[0].launches]
    assert all(args for _, args in early) and {x.pick for x, _ in early} == {(0, 0), (0, 1)}
    assert all(isinstance(a, Pointer) and a.space == "param" for _, args in early for a in args)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
def test_every_familys_candidates_give_the_reference_logits(name: str) -> None:
    """Whole tiny models with nothing timed: the first, second and third candidate of every choice."""
    from compilerllm.cuda_artifact import flat_module, prepare_bucket
    from compilerllm.passes.pipeline import Options, run_pipeline
    from compilerllm.validation.weights import bind
    from tests.kernels.triton.test_architectures import CHUNKS, DECODE, MIXED, make_step
    from tests.models.tiny import captured, tiny_model
    from tests.passes.running import Served

    tensors = {k: v.detach() for k, v in tiny_model(name).state_dict().items()}
    served, _ = run_pipeline(captured(name).module, Options(level=2, target="cuda-sm_90"))
    chooser = TunedChooser(None, most=3)
    machine = Machine(
        flat_module(served), bind(served, tensors), [MIXED, DECODE], prepare=prepare_bucket, chooser=chooser
    )
    whole = machine.program
    assert {"linear", "decode_qkv", "prefill_attention"} <= {c.family for c in whole.choices}
    for candidate in range(3):
        picks = [min(candidate, len(c.configs) - 1) for c in whole.choices]
        machine.program = whole.picked(picks)
        for state in machine.states.values():
            state.fill_(float("nan"))
        reference = Served(served, tensors, len(CHUNKS[0]))
        done = [0] * len(CHUNKS[0])
        for number, chunks in enumerate(CHUNKS):
            want = reference.step(chunks)
            (got,) = machine.run(min(number, 1), make_step(done, chunks, machine.groups))
            done = [a + len(c) for a, c in zip(done, chunks, strict=True)]
            assert (got.cpu() - want).abs().max().item() <= 2e-5 * want.abs().max().item()
