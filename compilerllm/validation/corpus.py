"""Small modules on which each pass matches at least once: the cases of tests/passes, and tiny models at every stage."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from compilerllm.ir.graph import Module
from compilerllm.ir.step import Bucket
from compilerllm.ir.text import parse_module
from compilerllm.passes.pipeline import Options, Pass, passes_for
from compilerllm.validation.errors import CannotValidate
from compilerllm.validation.rewrites import BUCKET_PASSES, BucketOptions, every_pass

TESTS = Path(__file__).parents[2] / "tests"
Entry = tuple[str, Module, tuple[str, ...]]


def corpus(tests: Path = TESTS) -> list[Entry]:
    """(name, module, names of the passes to run on it), of all cases and all tiny models. Needs a checkout.

    A case is run through its folder's pass, whether that matches or says why not. A tiny model appears once for each
    pass that changes it, as it is right before that pass.
    """
    return [*cases(tests), *stages(tests)]


def cases(tests: Path = TESTS) -> list[Entry]:
    """The part before ``---`` of every file in tests/passes/cases."""
    files = sorted((tests / "passes" / "cases").glob("*/*.ir"))
    if not files:
        raise CannotValidate(f"{tests} has no cases of passes; the corpus needs a checkout of the sources")
    return [
        (
            f"{p.parent.name}/{p.stem}",
            parse_module(p.read_text().partition("---\n")[0], str(p)),
            (p.parent.name,),
        )
        for p in files
    ]


def stages(tests: Path = TESTS) -> list[Entry]:
    """Every tiny model of tests/validation/corpus, as it is before each pass that changes it."""
    return [
        (f"{name}/{number:02d}_{entry.name}", module, (entry.name,))
        for name in models(tests) for number, (entry, module) in enumerate(walk(captured(name, tests)))
    ]  # fmt: skip


def models(tests: Path = TESTS) -> list[str]:
    """The architectures that are kept as captured."""
    return sorted(p.stem for p in (tests / "validation" / "corpus").glob("*.ir"))


@cache
def captured(name: str, tests: Path = TESTS) -> Module:
    """One of them, before any pass."""
    path = tests / "validation" / "corpus" / f"{name}.ir"
    return parse_module(path.read_text(), str(path))


def walk(module: Module, options: Options | None = None) -> Iterator[tuple[Pass, Module]]:
    """Each pass that changes the module on its way to a target's code, with the module before it."""
    options = options or Options(level=1)
    for entry in passes_for(options):
        new, _ = entry.run(module, options)
        if new is not module:
            yield entry, module
            module = new
    by_name = {p.name: p for p in BUCKET_PASSES}
    for entry in (by_name["inline_calls"], by_name["fuse_route"]):
        new, _ = entry.run(module, options)
        if new is not module:
            yield entry, module
            module = new
    for entry in BUCKET_PASSES:
        if entry.phase == "bucket":
            new, _ = entry.run(module, BucketOptions(bucket=Bucket(4, 4, 4, 1)))
            if new is not module:
                yield entry, module


def exercised(entries: list[Entry]) -> frozenset[str]:
    """Passes that change at least one module of theirs, with the options that validation asks with."""
    from compilerllm.validation.rewrites import ASKED

    known = every_pass()
    return frozenset(
        name
        for _, module, names in entries
        for name in names
        if known[name].run(module, ASKED)[0] is not module
    )
