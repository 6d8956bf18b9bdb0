"""Validates passes: each application is run beside the graph it replaced, under the relation its pass declares."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from compilerllm.ir.errors import IRError
from compilerllm.ir.graph import Graph, Module
from compilerllm.ir.step import Bucket
from compilerllm.ir.types import StepType
from compilerllm.ir.verify import verify
from compilerllm.passes.add_adapters import AdapterOptions
from compilerllm.passes.fuse_norm_linear import fuse_norm_linear
from compilerllm.passes.fuse_norm_route import fuse_norm_route
from compilerllm.passes.fuse_qkv_attention import fuse_qkv_attention
from compilerllm.passes.fuse_route import fuse_route
from compilerllm.passes.gather_early import gather_early
from compilerllm.passes.inline_calls import inline_calls
from compilerllm.passes.pipeline import PASSES, Options, Pass, passes_for, run_pipeline
from compilerllm.passes.report import PassReport
from compilerllm.passes.sample_every_token import sample_every_token
from compilerllm.passes.shard import Mesh
from compilerllm.passes.specialize import specialize
from compilerllm.validation import interfaces
from compilerllm.validation.errors import CannotValidate, RewriteInvalid
from compilerllm.validation.inputs import KINDS, Kind, Trial
from compilerllm.validation.promises import broken
from compilerllm.validation.relations import Application, Difference, Relation, Same
from compilerllm.validation.running import REFUSALS, one_thread


@dataclass(frozen=True)
class Finding:
    """One way in which a pass is wrong. ``error`` and ``budget`` are of the same unit; infinite where nothing compares."""

    pass_name: str
    function: str
    what: str
    kind: str = ""
    error: float = 0.0
    budget: float = 0.0
    nodes: tuple[str, ...] = ()
    origin: str = ""

    def __str__(self) -> str:
        nodes = "; ".join(self.nodes[:3]) + (
            f" and {len(self.nodes) - 3} more" if len(self.nodes) > 3 else ""
        )
        at = f" at {nodes}" if nodes else ""
        source = f" (from {self.origin})" if self.origin else ""
        size = f", by {self.error:.3g} where {self.budget:.3g} is allowed" if self.kind else ""
        inputs = f" on inputs of kind {self.kind!r}" if self.kind else ""
        return f"{self.pass_name}: @{self.function}: {self.what}{inputs}{size}{at}{source}"


def _never(kind: Kind) -> bool:
    """Matrix products of another shape, or in another dtype, in which sums may go in another order."""
    return False


def _rows_in_order(kind: Kind) -> bool:
    """All rows are sampled in order, so that both sides multiply matrices of the same size."""
    return kind.sample == "all"


def _decodes(app: Application, trial: Trial) -> bool:
    """One token a sequence, each sampled."""
    return trial.step is None or (trial.kind.sample == "all" and trial.step.max_query <= 1)


def _in_bucket(app: Application, trial: Trial) -> bool:
    return trial.step is None or bucket_of(app.options).holds(trial.step)


# How each pass's two graphs correspond. A pass that is not here keeps interfaces and bits (``Same``).
RELATIONS: dict[str, Relation] = {
    "drop_batch": interfaces.drop_batch,
    "page_attention": interfaces.page_attention,
    "segment_attention": interfaces.segment_attention,
    "rotate_boundary": Same(alone=False),
    "gather_rows": Same(interfaces.sampled_rows, exact=_rows_in_order),
    "gather_early": Same(exact=_rows_in_order),
    "float_logits": Same(interfaces.rounded_as_before, exact=_never),
    "pack_projections": Same(exact=_never),
    "split_heads": Same(exact=_never),
    "shard": interfaces.shard,
    "add_adapters": interfaces.add_adapters,
    "sample_every_token": Same(wanted=_decodes, alone=False),
    "inline_calls": Same(alone=False),
    "specialize": Same(wanted=_in_bucket, alone=False),
}


@dataclass(frozen=True)
class BucketOptions(Options):
    """Options of passes that depend on a bucket."""

    bucket: Bucket = field(default_factory=lambda: Bucket(1, 1, 4, 1))


def bucket_of(options: Options) -> Bucket:
    return options.bucket if isinstance(options, BucketOptions) else BucketOptions().bucket


def _graph(run: Callable[[Graph, PassReport], Graph], meaning: str) -> Pass:
    return Pass(run.__name__, "bucket", meaning, on_graph=run)


# Passes beside the pipeline: what a CUDA build does with the flat module, and then with each bucket's.
BUCKET_PASSES: tuple[Pass, ...] = (
    Pass("inline_calls", "flat", "calls -> one flat main", on_module=lambda m, r, _: inline_calls(m, r)),
    Pass("fuse_route", "flat", "softmax, topk and what follows -> route", on_module=lambda m, r, _: fuse_route(m, r)),
    _graph(gather_early, "sampled rows before the last layer's per-row work"),
    Pass("sample_every_token", "bucket", "no gather where all tokens are sampled",
         on_module=lambda m, r, _: sample_every_token(m, r)),
    _graph(fuse_norm_linear, "add_rms_norm and its only linear -> norm_linear"),
    _graph(fuse_norm_route, "add_rms_norm, linear and route -> norm_route"),
    _graph(fuse_qkv_attention, "qkv_rope_write and paged_attention -> qkv_attention"),
    Pass("specialize", "bucket", "dims -> a bucket's bounds and numbers",
         on_module=lambda m, r, options: specialize(m, bucket_of(options))),
)  # fmt: skip
# Passes that run only where they are asked for, and how validation asks.
ASKED = BucketOptions(mesh=Mesh(1, 2), adapters=AdapterOptions(("q_proj",), 3, 2))
_ON_MODULE: dict[str, Callable[[Any], Callable[[Module, PassReport, Options], Module]]] = {
    "shard": lambda run: lambda m, r, o: run(m, o.mesh, r),
    "add_adapters": lambda run: lambda m, r, o: run(m, o.adapters, r),
    "specialize": lambda run: lambda m, r, o: run(m, bucket_of(o)),
}


def every_pass() -> dict[str, Pass]:
    """Every pass there is, by name: the pipeline's and the buckets'."""
    return {p.name: p for p in (*PASSES, *BUCKET_PASSES)}


def entry_for(run: Pass | Callable[..., Any]) -> Pass:
    """The pass, or the list's entry for a function of its name with the function in its place.

    Raises ``CannotValidate`` for a name that no pass has.
    """
    if isinstance(run, Pass):
        return run
    entry = every_pass().get(run.__name__)
    if entry is None:
        raise CannotValidate(f"there is no pass called {run.__name__!r}")
    if entry.on_graph is not None:
        return replace(entry, on_graph=run)
    adapt = _ON_MODULE.get(run.__name__, _plain)
    return replace(entry, on_module=adapt(run))


def _plain(run: Callable[[Module, PassReport], Module]) -> Callable[[Module, PassReport, Options], Module]:
    return lambda module, report, _: run(module, report)


def validate_pass(
    run: Pass | Callable[..., Any], module: Module, options: Options | None = None, *,
    kinds: Sequence[Kind] = KINDS, seed: int = 0, thorough: bool = True,
) -> list[Finding]:  # fmt: skip
    """Apply a pass to ``module`` and hold the result to the pass's relation; empty means valid.

    ``run`` is an entry of a list of passes, or a function with the name of one. A pass that raises, or makes a graph
    that the verifier refuses, is a finding; one that changes nothing is valid. ``thorough``: also check that the
    replacement consumes every attribute of what it replaced (``attributes.py``), and that the pass does not rely on what
    it does not ask for (``variations.py``).
    """
    entry, options = entry_for(run), options or ASKED
    found = list(_validated(entry, module, options, kinds, seed))
    if thorough and not found:
        from compilerllm.validation.attributes import unconsumed

        found += unconsumed(entry, module, options, seed)
    return found


def _validated(
    entry: Pass, module: Module, options: Options, kinds: Sequence[Kind], seed: int
) -> Iterator[Finding]:
    try:
        after, _ = entry.run(module, options)
    except Exception as error:  # noqa: BLE001 - whatever a wrong pass stumbles over is what is wrong with it
        yield Finding(entry.name, "main", f"the pass fails: {type(error).__name__}: {error}")
        return
    yield from validate_application(entry, module, after, options, kinds=kinds, seed=seed)


def validate_application(
    entry: Pass, before: Module, after: Module, options: Options | None = None, *,
    kinds: Sequence[Kind] = KINDS, seed: int = 0,
) -> list[Finding]:  # fmt: skip
    """Hold one application of a pass to its promises and its relation. The first difference of each function and kind is told."""
    if after is before:
        return []
    try:
        verify(after)
    except IRError as error:
        return [Finding(entry.name, "main", f"the rewritten graph is malformed: {error}")]
    options = options or ASKED
    if promised := list(broken(entry.name, before, after, bucket_of(options))):
        return [Finding(entry.name, "main", what) for what in promised]
    relation = RELATIONS.get(entry.name, Same())
    app = Application(entry, options, before, after, kinds, seed)
    found: dict[tuple[str, str], Finding] = {}
    with one_thread():
        try:
            for d in relation(app):
                found.setdefault((d.function, d.kind), _finding(entry.name, d))
        except CannotValidate:
            raise
        except REFUSALS as why:
            found["main", ""] = Finding(entry.name, "main", f"the two graphs do not compare: {why}")
    return list(found.values())


def _finding(name: str, d: Difference) -> Finding:
    return Finding(name, d.function, d.what, d.kind, d.error, d.budget, d.nodes, d.origin)


def serves(module: Module) -> bool:
    """Whether the module takes steps."""
    return any(isinstance(v.type, StepType) for v in module.main.inputs)


OnValidated = Callable[[Pass, list[Finding]], None]


def verify_pipeline(
    module: Module, options: Options | None = None, on_validated: OnValidated | None = None, *,
    passes: Sequence[Pass] | None = None, kinds: Sequence[Kind] = KINDS, seed: int = 0, thorough: bool = False,
) -> list[Finding]:  # fmt: skip
    """Run the pipeline and validate every application of every pass. Raises what a pass refuses with.

    ``on_validated`` is called after each pass that changed something, with what was found.
    """
    options = options or Options()
    found: list[Finding] = []
    last = [module]

    def validate(entry: Pass, new: Module, _: list[PassReport]) -> None:
        before, last[0] = last[0], new
        if new is before:
            return
        mine = validate_application(entry, before, new, options, kinds=kinds, seed=seed)
        if thorough and not mine:
            from compilerllm.validation.attributes import unconsumed

            mine += unconsumed(entry, before, options, seed)
        found.extend(mine)
        if on_validated is not None:
            on_validated(entry, mine)

    run_pipeline(module, options, validate, passes)
    return found


def require_valid(findings: Sequence[Finding]) -> None:
    """Raise ``RewriteInvalid`` with the findings, where there are any."""
    if findings:
        raise RewriteInvalid(told(findings))


def told(findings: Sequence[object]) -> str:
    """The first few findings, a line each, and how many more there are."""
    more = f"\nand {len(findings) - 5} more" if len(findings) > 5 else ""
    return "\n".join(map(str, findings[:5])) + more


__all__ = [
    "Finding",
    "entry_for",
    "every_pass",
    "passes_for",
    "validate_application",
    "validate_pass",
    "verify_pipeline",
]
