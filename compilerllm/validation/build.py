"""Validates what a build does to a model's graph: the pipeline, then for a GPU the flat module and each bucket's rewrites.

The model is made small first (``shrink.py``), so that this takes seconds whatever its size. Then the passes also run
over the large graph, and must leave the same nodes in the same order with the same attributes, sizes aside: what was
shown of the small graph is then shown of the rewrites that the build makes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from compilerllm.cuda_artifact import bucket_passes, flat_module, prepare_bucket
from compilerllm.ir.graph import Attr, Graph, Module, Node
from compilerllm.ir.step import Bucket
from compilerllm.kernels.cpu.target import CpuTarget
from compilerllm.kernels.triton.target import CudaTarget
from compilerllm.passes.pipeline import Options, Pass, passes_for, run_pipeline
from compilerllm.passes.report import PassReport
from compilerllm.validation.inputs import KINDS
from compilerllm.validation.rewrites import (
    Finding,
    every_pass,
    require_valid,
    validate_application,
    verify_pipeline,
)
from compilerllm.validation.shrink import shrink, thin

OnProgress = Callable[[str, int, int], None]
SIZED = frozenset(("shape", "start", "stop", "size", "extent", "heads", "window", "fn"))


@dataclass(frozen=True)
class Verdict:
    """One pass of a build: what stands in for ``where`` (the pipeline's phase, or a bucket), what was found."""

    name: str
    where: str
    findings: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        outcome = f"{len(self.findings)} findings" if self.findings else "valid"
        return f"{self.name} ({self.where}): {outcome}"


@dataclass(frozen=True)
class Report:
    """What validating a build found, pass by pass in the order they ran."""

    verdicts: tuple[Verdict, ...]
    seconds: float = field(compare=False)

    @property
    def findings(self) -> list[Finding]:
        return [f for v in self.verdicts for f in v.findings]

    def require(self) -> None:
        """Raise ``RewriteInvalid`` where anything was found."""
        require_valid(self.findings)

    def __str__(self) -> str:
        lines = [str(v) for v in self.verdicts if v.findings]
        lines += [f"  {f}" for f in self.findings]
        valid = sum(not v.findings for v in self.verdicts)
        return "\n".join(
            [*lines, f"{valid} of {len(self.verdicts)} rewrites are valid ({self.seconds:.1f} s)"]
        )


def verify_build(
    captured: Module,
    target: CpuTarget | CudaTarget,
    level: int,
    buckets: Sequence[Bucket] = (),
    on_progress: OnProgress | None = None,
    *,
    options: Options | None = None,
    seed: int = 0,
) -> Report:
    """Validate every rewrite that a build of ``captured`` for ``target`` does. Findings are in the report, not raised.

    ``buckets`` matter to a GPU only: the smallest stands for all that get the same passes, which are not told its size.
    ``on_progress`` is told the pass that comes next, how many are done, and of how many.
    """
    start = time.perf_counter()
    options = replace(options or Options(), level=level, target=target.name)
    tell = on_progress or (lambda name, done, total: None)
    cuda = isinstance(target, CudaTarget) and level > 0  # level 0 runs the reference
    chosen = representatives(buckets) if cuda else []
    total = len(passes_for(options)) + sum(len(bucket_passes(b)) for b in chosen) + (2 if cuda else 0)
    verdicts: list[Verdict] = []
    small = shrink(captured)

    def note(entry: Pass, mine: list[Finding]) -> None:
        verdicts.append(Verdict(entry.name, entry.phase, tuple(mine)))
        tell(entry.name, len(verdicts), total)

    large, _ = run_pipeline(thin(captured), options)  # a refusal here is the build's own
    verify_pipeline(small, options, note, seed=seed)
    last, _ = run_pipeline(small, options)
    verdicts.append(Verdict("pipeline", "as over the full sizes", tuple(unlike(large, last))))
    if cuda:
        checker = _Checker(last, options, seed, verdicts, lambda name: tell(name, len(verdicts), total))
        flat = flat_module(last, checker.note("flat"))
        whole = flat_module(large)
        for bucket in chosen:
            checker.last, checker.options = flat, options
            prepared = prepare_bucket(flat, bucket, checker.note(_name(bucket)))
            same = tuple(unlike(prepare_bucket(whole, bucket), prepared))
            verdicts.append(Verdict("bucket", f"{_name(bucket)}, as over the full sizes", same))
    tell("", total, total)
    return Report(tuple(verdicts), time.perf_counter() - start)


class _Checker:
    """Follows a module through rewrites that are told one after another."""

    def __init__(
        self,
        module: Module,
        options: Options,
        seed: int,
        verdicts: list[Verdict],
        tell: Callable[[str], None],
    ) -> None:
        self.last, self.options, self.seed, self.verdicts, self.tell = module, options, seed, verdicts, tell

    def note(self, where: str) -> Callable[[Module, PassReport], None]:
        def told(module: Module, report: PassReport) -> None:
            before, self.last = self.last, module
            if module is not before:
                entry = every_pass()[report.name]
                found = validate_application(entry, before, module, self.options, kinds=KINDS, seed=self.seed)
                self.verdicts.append(Verdict(report.name, where, tuple(found)))
                self.tell(report.name)

        return told


def representatives(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The smallest bucket of each set of passes."""
    found: dict[tuple[str, ...], Bucket] = {}
    for bucket in sorted(buckets, key=lambda b: (b.tokens, b.rows)):
        found.setdefault(tuple(run.__name__ for run in bucket_passes(bucket)), bucket)
    return list(found.values())


def _name(bucket: Bucket) -> str:
    return f"{'decode' if bucket.max_query == 1 else 'mixed'} bucket of {bucket.tokens} tokens, {bucket.rows} rows"


def unlike(large: Module, small: Module) -> Iterator[Finding]:
    """Where two modules differ in more than sizes: functions, ops, how nodes hang together, attributes."""
    for name in dict.fromkeys((*large.functions, *small.functions)):
        a, b = large.functions.get(name), small.functions.get(name)
        if a is None or b is None:
            yield Finding(
                "pipeline", name, "the function is there for one of the full and the small sizes only"
            )
            continue
        left, right = _lines(a), _lines(b)
        for one, two in zip(left, right, strict=False):
            if one != two:
                yield Finding("pipeline", name, f"the full sizes give {one}, the small ones {two}")
                break
        else:
            if len(left) != len(right):
                what = f"the full sizes give {len(left)} nodes, the small ones {len(right)}"
                yield Finding("pipeline", name, what)


def _lines(graph: Graph) -> list[str]:
    return [f"{node!r} {_attrs(node)}" for node in graph.nodes]


def _attrs(node: Node) -> dict[str, Attr]:
    return {k: v for k, v in sorted(node.attrs.items()) if k not in SIZED}
