"""Tries one mutant in a process of its own: puts the edited file in the original's place there, and validates.

Sources on disk stay as they are. A pass is validated on the modules of a corpus that the edit changes the result of, a
kernel template on the cases whose kernels are made from it.
"""

import importlib.abc
import importlib.util
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compilerllm.validation.machine_code import same_assembly, same_cubins
from compilerllm.validation.mutants import ROOT, Mutant

PASSES, TEMPLATES, CSRC = "passes", "kernels/triton/templates", "kernels/cpu/csrc"
CAUGHT, SURVIVED, SAME, INVALID = "caught", "survived", "no effect", "no mutant"
_RESULTS, _VALUE = re.compile(r"^ +(%.*?) = ", re.M), re.compile(r"%[\w.]+")


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. how: the finding that caught it, or why it does not count."""

    mutant: Mutant
    status: str
    how: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _Overlay(importlib.abc.MetaPathFinder):
    """Finds some modules in other files than their own."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of an edited module; None for all others."""
        file = self.files.get(name)
        return None if file is None else importlib.util.spec_from_file_location(name, file)


def replace_modules(mutant: Mutant, folder: Path, names: Sequence[str], forget: Sequence[str]) -> None:
    """From now on ``names`` are the mutant's text; modules whose names begin with one of ``forget`` are imported anew."""
    file = folder / Path(mutant.path).name
    file.write_text(mutant.source())
    sys.meta_path.insert(0, _Overlay(dict.fromkeys(names, file)))
    for name in [n for n in sys.modules if n.startswith(tuple(forget))]:
        del sys.modules[name]


def replace_modules_by(file: Path, stem: str) -> None:
    """From now on the template module ``stem``, not yet imported, is the text of ``file``."""
    package = "compilerllm.kernels.triton"
    names = f"{package}.templates.{stem}", f"{package}.interpreted.{stem}"
    sys.meta_path.insert(0, _Overlay(dict.fromkeys(names, file)))


# -- passes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PassCorpus:
    """Modules with the passes to run on each, and the text that each pass makes of it: (entry, pass) -> text."""

    entries: Sequence[tuple[str, Any, tuple[str, ...]]]
    made: Mapping[tuple[str, str], str]
    slow: Mapping[tuple[str, str], float]

    def fires(self, entry: str, name: str, module: Any) -> bool:
        """Whether the pass as it is changes the module."""
        from compilerllm.ir.text import print_module

        return self.made[entry, name] != print_module(module)

    def of(self, names: frozenset[str]) -> list[tuple[str, Any, str]]:
        """Entries of some passes, quick ones first."""
        found = [(e, m, n) for e, m, passes in self.entries for n in passes if n in names]
        return sorted(found, key=lambda x: self.slow[x[0], x[2]])


def nameless(text: str) -> str:
    """A module's text with its nodes' results numbered: what they are called changes nothing."""
    functions = []
    for function in text.split("\nfunc "):
        made = [n for line in _RESULTS.findall(function) for n in _VALUE.findall(line)]
        names = {n: f"%{i}" for i, n in enumerate(dict.fromkeys(made))}
        functions.append(_VALUE.sub(lambda m, names=names: names.get(m[0], m[0]), function))  # type: ignore[misc]
    return "\nfunc ".join(functions)


def result_of(run: Callable[[], Any]) -> str:
    """A module's text; where the pass refuses, its words."""
    from compilerllm.ir.text import print_module
    from compilerllm.passes.errors import PassError

    try:
        return print_module(run())
    except PassError as error:
        return f"{type(error).__name__}: {error}"


def pass_corpus() -> PassCorpus:
    """Of the sources as they are."""
    from compilerllm.validation.corpus import corpus
    from compilerllm.validation.rewrites import ASKED, every_pass

    known, entries = every_pass(), corpus()
    made: dict[tuple[str, str], str] = {}
    slow: dict[tuple[str, str], float] = {}
    for name, module, passes in entries:
        for entry in passes:
            start = time.perf_counter()
            made[name, entry] = result_of(lambda e=entry, m=module: known[e].run(m, ASKED)[0])  # type: ignore[misc]
            slow[name, entry] = time.perf_counter() - start
    return PassCorpus(entries, made, slow)


def passes_in(path: str, known: frozenset[str]) -> frozenset[str]:
    """The passes whose code a file is part of: its own, or those that import it, directly or not."""
    imports = {p.stem: p.read_text() for p in (ROOT / PASSES).glob("*.py")}
    found, wanted = set[str](), [Path(path).stem]
    while wanted:
        name = wanted.pop()
        if name in found or name == "pipeline":
            continue
        found.add(name)
        if name not in known:
            wanted += [
                other for other, text in imports.items() if f"compilerllm.passes.{name} import" in text
            ]
    return frozenset(found & known)


def try_pass(mutant: Mutant, corpus: PassCorpus, folder: Path) -> tuple[str, str]:
    """Status and how, in the present process, which is spoilt for anything else."""
    module = f"compilerllm.passes.{Path(mutant.path).stem}"
    replace_modules(mutant, folder, [module], ["compilerllm.passes.", "compilerllm.validation."])
    try:
        from compilerllm.validation.attributes import unconsumed
        from compilerllm.validation.rewrites import ASKED, every_pass, validate_pass

        known = every_pass()
    except Exception as error:  # noqa: BLE001 - the edit does not import
        return INVALID, f"{type(error).__name__}: {error}"
    from compilerllm.ir.text import print_module

    entries = corpus.of(passes_in(mutant.path, frozenset(known)))
    changed, given_up = [], list[str]()
    for title, graph, name in entries:
        try:
            text = result_of(lambda n=name, m=graph: known[n].run(m, ASKED)[0])  # type: ignore[misc]
        except Exception as error:  # noqa: BLE001 - whatever a wrong pass stumbles over
            return CAUGHT, f"{title}: the pass fails: {type(error).__name__}: {error}"
        if text == print_module(graph) and corpus.fires(title, name, graph):
            given_up.append(title)
        if nameless(text) != nameless(corpus.made[title, name]):
            changed.append((title, graph, name))
    for title, graph, name in changed:
        if found := validate_pass(known[name], graph, thorough=False):
            return CAUGHT, f"{title}: {found[0]}"
    for title, graph, name in (*changed, *(e for e in entries if e not in changed)):
        small = title.startswith(f"{name}/")  # a case of the pass, not a whole model
        if small and corpus.fires(title, name, graph) and (found := unconsumed(known[name], graph, ASKED)):
            return CAUGHT, f"{title}: {found[0]}"
    if given_up:
        return CAUGHT, f"{given_up[0]} is in the corpus because the pass rewrites it, and no longer is"
    if not changed:
        return SAME, "every module of the corpus is rewritten as before"
    return (
        SURVIVED,
        f"{len(changed)} of {len(entries)} modules are rewritten otherwise, {changed[0][0]} among them",
    )


# -- kernels ----------------------------------------------------------------------------------------------------------


def try_triton(mutant: Mutant, units: Sequence[Any], folder: Path) -> tuple[str, str]:
    """Status and how, over ``units`` in their order. No template has been imported in this process."""
    file = folder / Path(mutant.path).name
    file.write_text(mutant.source())
    replace_modules_by(file, file.stem)
    for unit in units:
        if found := unit.run(folder):
            return CAUGHT, str(found[0])
    if same_cubins(f"{file.stem}.{mutant.where}", file, [u.case.title for u in units]):
        return SAME, "all cases' kernels are the same machine code for sm_90"
    return SURVIVED, f"{len(units)} cases find nothing"


def _preprocessed(mutant: Mutant, folder: Path) -> str:
    """The edited file's own lines as the compiler of this machine's target sees them."""
    from compilerllm.kernels.cpu.build import compiler
    from compilerllm.kernels.cpu.target import host_target

    name = Path(mutant.path).name
    command = [*compiler()[0], *host_target().compile_flags, "-x", "c++", "-E", name]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    own, kept = False, []
    for line in found.splitlines():
        if line.startswith("# "):
            own = f'"{name}"' in line
        elif own:
            kept.append(line)
    return "\n".join(kept)


def _unseen(mutant: Mutant, overlay: Path) -> tuple[str, str]:
    if _preprocessed(mutant, overlay) == _preprocessed(mutant, ROOT / CSRC):
        return SAME, "this machine's target leaves the line out"
    return SURVIVED, f"no case has a kernel that {mutant.where} is part of"


def try_cpp(mutant: Mutant, units: Sequence[Any], folder: Path) -> tuple[str, str]:
    """Status and how, over ``units`` in their order, built from a copy of the templates."""
    from compilerllm.kernels.cpu import build

    overlay = folder / "csrc"
    shutil.copytree(ROOT / CSRC, overlay)
    (overlay / Path(mutant.path).name).write_text(mutant.source())
    if not units:
        return _unseen(mutant, overlay)
    if _preprocessed(mutant, overlay) == _preprocessed(mutant, ROOT / CSRC):
        return SAME, "this machine's target leaves the line out"
    build.SOURCE_DIR = overlay
    build.templates_hash.cache_clear()
    for unit in units:
        if found := unit.run(folder):
            if "BuildFailed" in found[0].error:
                return INVALID, found[0].error
            return CAUGHT, str(found[0])
    if same_assembly(units, ROOT / CSRC, overlay):
        return SAME, "all cases' programs are the same machine code for this machine"
    return SURVIVED, f"{len(units)} cases find nothing"
