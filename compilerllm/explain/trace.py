"""The passes once more, from the captured module: what each made of it, matched and nearly matched."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from compilerllm.explain.report import IRNode, Miss, PassRun
from compilerllm.ir.graph import Graph, Module, Node, join_name
from compilerllm.ir.recipe import Concat, Read, Recipe, rename
from compilerllm.ir.text import print_module, print_node
from compilerllm.passes.pipeline import Options, Pass, run_pipeline
from compilerllm.passes.report import PassReport

# Rewrites that are no part of the pipeline: phase and meaning by name.
_TARGETS_OWN = {
    "inline_calls": ("flatten", "the body of every layer where it is called"),
    "fuse_route": ("flatten", "softmax, topk and what follows -> route"),
    "gather_early": ("bucket", "sampled rows are taken before the last layer's projections"),
    "sample_every_token": ("bucket", "every token is sampled: no gather"),
    "fuse_norm_linear": ("bucket", "a norm moves into the linear that alone reads it"),
    "fuse_norm_route": ("bucket", "norm, router and routing -> one node"),
    "fuse_qkv_attention": ("bucket", "qkv_rope_write and paged_attention -> qkv_attention"),
    "select_layouts": ("layout", "weights as the target's kernels read them: recipes change, nodes do not"),
}
_LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


class Trace:
    """Collects pass runs and the distinct texts of modules."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.runs: list[PassRun] = []
        self._places: dict[str, int] = {}
        self._printed: dict[int, tuple[Module, int]] = {}  # the module is kept, so that its id stays its own

    def text(self, module: Module) -> int:
        """The place of a module's text, with origins."""
        known = self._printed.get(id(module))
        if known is None:
            printed = print_module(module, origins=True)
            place = self._places.setdefault(printed, len(self.texts))
            if place == len(self.texts):
                self.texts.append(printed)
            known = self._printed[id(module)] = (module, place)
        return known[1]

    def pipeline(self, module: Module, options: Options) -> Module:
        """Run the pipeline; gives the module after it."""
        before = self.text(module)

        def on_pass(entry: Pass, made: Module, reports: list[PassReport]) -> None:
            nonlocal before
            after = self.text(made)
            self.runs.append(_pass_run(entry.name, entry.phase, entry.meaning, before, after, reports))
            before = after

        return run_pipeline(module, options, on_pass=on_pass)[0]

    def rewrites(self, module: Module, buckets: Sequence[str] = ()) -> Callable[[Module, PassReport], None]:
        """What to call after each of the rewrites of ``module`` that are the target's own."""
        before = self.text(module)

        def on_rewrite(made: Module, report: PassReport) -> None:
            nonlocal before
            after = self.text(made)
            phase, meaning = _TARGETS_OWN.get(report.name, ("target", ""))
            run = _pass_run(report.name, phase, meaning, before, after, [report])
            self.runs.append(replace(run, buckets=tuple(buckets)))
            before = after

        return on_rewrite


def _pass_run(
    name: str, phase: str, meaning: str, before: int, after: int, reports: Iterable[PassReport]
) -> PassRun:
    reports = list(reports)
    counts: dict[str, int] = {}
    for report in reports:
        for what, number in report.counts.items():
            counts[what] = counts.get(what, 0) + number
    return PassRun(
        name, phase, meaning, before, after,
        matches=sum(r.matches for r in reports),
        seconds=round(sum(r.seconds for r in reports), 6),
        functions={r.function or "main": r.matches for r in reports if r.matches},
        counts=counts,
        misses=tuple(Miss(r.function or "main", m.node, m.reason, m.path) for r in reports for m in r.near_misses),
    )  # fmt: skip


def describe_node(node: Node, graph: Graph, module: Module, prefix: str = "") -> IRNode:
    """A node of ``graph`` as it is run under ``prefix``, the module path of the call."""
    path = join_name(prefix, node.origin.path) if node.origin.path else prefix
    params = {p.value: p for p in graph.params}
    recipes = [rename(params[v].recipe, partial(join_name, prefix)) for v in node.operands if v in params]
    names = dict.fromkeys(name.rpartition(".")[0] for r in recipes for name in _reads(r))
    # What a layer's function holds may be another layer's module by its path: rotated boundaries. The call knows better.
    found = _LAYER.search(prefix) or _LAYER.search(path)
    body = tuple(n.op for n in module.functions[node.fn].nodes) if node.op == "group" else ()
    return IRNode(
        print_node(node).strip(), node.op, graph.name, path, int(found[1]) if found else -1,
        node.origin.ops, node.origin.passes, tuple(n for n in names if n), body,
    )  # fmt: skip


def _reads(recipe: Recipe) -> list[str]:
    """Names of the checkpoint's tensors that a recipe reads, in order."""
    if isinstance(recipe, Read):
        return [recipe.name]
    parts = recipe.sources if isinstance(recipe, Concat) else (getattr(recipe, "source", None),)
    return [name for part in parts if part is not None for name in _reads(part)]
