"""Whether an edit of a template changes any machine code: one that does not is no mutant, whatever it reads like.

Triton's kernels are compiled for sm_90 by processes of their own, ``python -m compilerllm.validation.machine_code FUNCTION
FILE TITLE...``: what kernels of the cases become that call a function ("module.name"), with the module's text in FILE, or
as it is where FILE is empty. C++ is compared as assembler text.
"""

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CAPABILITY = 90
LIMIT_S = 300.0


def same_cubins(function: str, edited: Path, titles: Sequence[str]) -> bool:
    """Whether all kernels of the cases are the same with the edited file; False where that cannot be told."""
    found = set[str]()
    for file in ("", str(edited)):
        command = [sys.executable, "-m", "compilerllm.validation.machine_code", function, file, *titles]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return False
        if done.returncode != 0 or not done.stdout:
            return False
        found.add(done.stdout)
    return len(found) == 1


def same_assembly(units: Sequence[Any], original: Path, edited: Path) -> bool:
    """Whether the programs of the cases, and the sampler, compile to the same text from both folders of templates."""
    from compilerllm.validation.kernel_case import KernelCase
    from compilerllm.validation.kernels import cpu_program

    sources = {cpu_program(u.case).source for u in units if isinstance(u.case, KernelCase)}
    for name in ("runtime.cpp", "sampler.cpp"):
        if (original / name).read_text() != (edited / name).read_text():
            return False
        sources.add((original / name).read_text())
    return all((made := _assembly(s, original)) and made == _assembly(s, edited) for s in sorted(sources))


def _assembly(source: str, folder: Path) -> str:
    from compilerllm.kernels.cpu.build import compiler
    from compilerllm.kernels.cpu.target import host_target

    command = [*compiler()[0], *host_target().compile_flags, f"-I{folder}", "-x", "c++", "-S", "-o", "-", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False).stdout


def _sources(title: str) -> list[Any]:
    """The kernels of a case of that title."""
    from compilerllm.kernels.triton.emit_sampling import draft_sampling
    from compilerllm.kernels.triton.target import find_cuda_target
    from compilerllm.validation.kernel_cases import cases
    from compilerllm.validation.kernels import cuda_machine, narrowed, torch_products
    from compilerllm.validation.sampling import FEW_PARTS, MOST_ROWS, SAMPLING

    for sampling in SAMPLING:
        if sampling.title == title:
            with narrowed({**FEW_PARTS, **sampling.limits}):
                draft, _ = draft_sampling(sampling.vocab, (2, MOST_ROWS), find_cuda_target("sm_90"))
            return draft.sources()
    (case,) = [c for c in cases() if c.title == title]
    with narrowed(case.limits), torch_products():
        return cuda_machine(case).sources


def main(arguments: Sequence[str]) -> int:
    """Prints a hash of each kernel, in order."""
    from compilerllm.validation.trying import replace_modules_by

    function, file, *titles = arguments
    if file:
        replace_modules_by(Path(file), function.partition(".")[0])
    from compilerllm.kernels.triton.build import compile_source
    from compilerllm.validation.reach import triton_functions

    wanted = dict.fromkeys(s for t in titles for s in _sources(t) if function in triton_functions(s.template))
    for source in wanted:
        code, _ = compile_source(source, CAPABILITY)
        print(hashlib.sha256(code).hexdigest())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
