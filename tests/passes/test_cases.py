"""Every ``cases/<pass>/*.ir``: what a pass makes of a module, as text (tests/validation holds the numbers to account).

A case is a module, ``---``, the module afterwards and a line for each near miss. ``COMPILERLLM_ACCEPT=1`` rewrites the
second part; read the difference before you commit it.
"""

import os
from pathlib import Path

import pytest

from compilerllm.ir.text import parse_module, print_module
from compilerllm.ir.verify import verify
from compilerllm.validation.rewrites import ASKED, every_pass

CASES = sorted((Path(__file__).parent / "cases").glob("*/*.ir"))
ACCEPT = os.environ.get("COMPILERLLM_ACCEPT") == "1"


def _parts(path: Path) -> tuple[str, str]:
    before, _, after = path.read_text().partition("---\n")
    return before, after


@pytest.mark.parametrize("path", CASES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_case(path: Path) -> None:
    before, after = _parts(path)
    module = parse_module(before, str(path))
    verify(module)
    result, reports = every_pass()[path.parent.name].run(module, ASKED)
    verify(result)
    misses = [f"# near miss: {miss}\n" for report in reports for miss in report.near_misses]
    text = "".join((print_module(result), *misses))
    assert print_module(parse_module(text)) == print_module(result), "the result does not read back"
    if ACCEPT:
        path.write_text(f"{before}---\n{text}")
        return
    assert text == after
    same = print_module(result) == print_module(module)
    assert same == (result is module), "a pass that changes nothing returns the module itself"


def test_every_pass_has_cases() -> None:
    assert {p.parent.name for p in CASES} == every_pass().keys()
