"""The mutation suite on a few mutants, and what its operators leave alone."""

import ast
from pathlib import Path

import pytest

from compilerllm.validation.cpp_mutants import cpp_mutants
from compilerllm.validation.machine_code import same_cubins
from compilerllm.validation.mutants import Mutant, pass_edits, python_mutants, sample, text_of, triton_edits
from compilerllm.validation.mutate import Trials, files, mutants_of, try_all
from compilerllm.validation.mutation_report import report, totals
from compilerllm.validation.trying import CAUGHT, INVALID, SAME, SURVIVED, Verdict, nameless

PASS, TEMPLATE, HEADER = "passes/fuse_gated.py", "kernels/triton/templates/norm.py", "kernels/cpu/csrc/norm.h"


def pick(found: list[Mutant], operator: str, before: str) -> Mutant:
    """The mutant of an operator at a place."""
    return next(m for m in found if m.operator == operator and before in m.before)


def check_caught(paths: list[str], wanted: list[Mutant]) -> None:
    texts = [(_root() / path).read_bytes() for path in paths]
    found = list(try_all(Trials(paths), wanted, 2))
    assert [(str(v.mutant), v.how) for v in found if v.status != CAUGHT] == []
    assert texts == [(_root() / path).read_bytes() for path in paths]


def test_a_few_mutants_are_caught_and_sources_stay() -> None:
    passes = python_mutants(PASS, pass_edits)
    wanted = [
        pick(passes, "swap the order", "(0, width // 2, 1)"),
        pick(passes, "drop an attribute", 'r.emit("gated_act_packed"'),
        pick(passes, "delete a guard", "out_dtype"),
    ]
    check_caught([PASS], wanted)


@pytest.mark.slow
def test_a_few_mutants_of_kernels_are_caught() -> None:
    template = python_mutants(TEMPLATE, triton_edits, triton=True)
    wanted = [
        pick(template, "drop a factor", "*"),
        pick(template, "skip a mask", "tl.load"),
        pick(cpp_mutants(HEADER), "delete a statement", "if (w)"),
        pick(cpp_mutants(HEADER), "change an operation", "p.eps"),
    ]
    check_caught([TEMPLATE, HEADER], wanted)


def test_what_changes_nothing_is_told_apart() -> None:
    text = text_of(PASS)
    at = text.index("_not_halves(packed: Value")
    line = text.count("\n", 0, at) + 1
    edit = next(m for m in python_mutants(PASS, pass_edits) if m.line > line).edit
    same = Mutant(
        PASS, line, "nothing", "", "", "", type(edit)(edit.start, edit.stop, text[edit.start : edit.stop])
    )
    broken = Mutant(PASS, line, "nothing", "", "", "", type(edit)(0, 0, "raise ValueError\n"))
    assert [v.status for v in try_all(Trials([PASS]), [same], 1)] == [SAME]
    assert [v.status for v in try_all(Trials([PASS]), [broken], 1)] == [INVALID]


QUICK = PASS, TEMPLATE, HEADER
FILES = [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in files()]


@pytest.mark.parametrize("path", FILES)
def test_every_file_has_mutants_that_read(path: str) -> None:
    found = mutants_of(path)
    assert len(found) >= 4
    for mutant in sample(found, 6):
        assert mutant.source() != text_of(path)
        if path.endswith(".py"):
            ast.parse(mutant.source())


def test_names_of_results_are_no_difference() -> None:
    one = "func @main(%x: f32[8]) {\n  param %w : f32[8]\n  %a = add(%x, %w) : f32[8]\n  return %a\n}\n"
    assert nameless(one) == nameless(one.replace("%a", "%total"))
    assert nameless(one) != nameless(one.replace("%w", "%v")), "a parameter's name is what it reads"
    assert nameless(one) != nameless(one.replace("add(%x, %w)", "add(%w, %x)"))


@pytest.mark.slow
def test_edits_that_leave_the_machine_code_alone(tmp_path: Path) -> None:
    path = "kernels/triton/templates/elementwise.py"
    same, other = tmp_path / "elementwise.py", tmp_path / "other" / "elementwise.py"
    other.parent.mkdir()
    same.write_text(text_of(path).replace("0.5 * x * (1.0 + tanh", "x * 0.5 * (1.0 + tanh"))
    other.write_text(text_of(path).replace("0.5 * x * (1.0 + tanh", "0.5 * x * (1.5 + tanh"))
    assert same_cubins("elementwise.gelu_tanh", same, ["groups/gates f32"])
    assert not same_cubins("elementwise.gelu_tanh", other, ["groups/gates f32"])


def test_the_same_seed_draws_the_same_mutants() -> None:
    found = python_mutants(PASS, pass_edits)
    assert sample(found, 5, 3) == sample(found, 5, 3) != sample(found, 5, 4)
    assert len({m.operator for m in sample(found, 5)}) == 5


def test_names_messages_and_hints_are_left_alone() -> None:
    for path, edits, triton in ((PASS, pass_edits, False), (TEMPLATE, triton_edits, True)):
        for mutant in python_mutants(path, edits, triton):
            assert "report.miss(" not in mutant.before or mutant.operator == "delete a guard", str(mutant)
            assert mutant.before not in ("PDL", "origin=origin"), str(mutant)


def test_the_report_lists_survivors_and_counts() -> None:
    found = python_mutants(PASS, pass_edits)
    verdicts = [
        Verdict(m, s, "why", 1.0) for m, s in zip(found, (CAUGHT, SURVIVED, SAME, INVALID), strict=False)
    ]
    assert totals(verdicts) == (1, 2)
    text = report(verdicts, 0, 61.0)
    assert "**Caught 1 of 2**" in text and f"{PASS}:{found[1].line}" in text and "| 1 | 1 | 1 | 1 |" in text


def _root() -> Path:
    return Path(__file__).parents[2]
