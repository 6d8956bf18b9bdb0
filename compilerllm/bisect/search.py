"""The search: is the whole right; if not, is it a pass or a kernel; which one, at which node.

Three comparisons decide. The program's logits against O0's say whether anything is wrong. The final graph, run by the
reference, says whether a pass or a kernel is: passes are then halved, kernels taken one by one on the inputs they had. If
every kernel is right alone, and the program too once no two values share bytes, it is the memory plan.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from compilerllm.bisect.budget import Whole, measure_whole, rms
from compilerllm.bisect.evaluate import Evaluator, Runtime, Site
from compilerllm.bisect.nodes import Checked, check_all
from compilerllm.bisect.passes import Stage, first_bad, judge, locate, run_stage
from compilerllm.bisect.report import LayerLine, NodeLine, Report, Verdict, right_text
from compilerllm.bisect.subject import CpuArtifact, CudaProgram, Program, Subject, pipeline_stages
from compilerllm.bisect.workload import Workload
from compilerllm.ir.errors import IRError
from compilerllm.passes.pipeline import Options, find_pass, run_pipeline

OnStage = Callable[[str], None]


class Search:
    """One bisection. ``on_stage`` is told what is being done, for a progress bar."""

    def __init__(
        self, subject: Subject, program: Program, work: Workload, on_stage: OnStage = lambda text: None
    ) -> None:
        self.subject, self.program, self.work, self.tell = subject, program, work, on_stage

    def run(self, every_node: bool = False) -> Report:
        """The report. ``every_node``: look at each node's kernel even where the whole is right."""
        s, work = self.subject, self.work
        self.tell("float32")
        self.exact = list(run_stage(Stage("capture", s.captured), s.params, work, wide=True))
        self.tell("O0")
        captured = list(run_stage(Stage("capture", s.captured), s.params, work))
        options = s.options
        plain, _ = run_pipeline(s.captured, Options(level=0, target=options.target))
        self.plain = Stage("O0", plain)
        own = list(run_stage(self.plain, s.params, work))
        # O0 has passes too; the yardstick of those is the graph before any.
        self.own = own if measure_whole(own, captured, self.exact).within else captured
        self.tell("the program")
        whole = measure_whole(self.program.run(work), self.own, self.exact)
        report = Report(
            s.name, options.target, options.level, s.dtype, tuple(map(len, work.sequences)),
            tuple(work.describe(i) for i in range(len(work.chunks))), whole, ran_as=self.program.ran_as,
        )  # fmt: skip
        if whole.within and not every_node:
            report.verdict = Verdict("right", right_text(whole))
            return report
        self.tell("the final graph in the reference")
        graph = judge(self._final(), s.params, work, self.own, self.exact)
        if not graph.within:
            report.verdict = self._pass()
            self._layers(report, None)
            return report
        self._kernel(report, whole)
        return report

    def _final(self) -> Stage:
        """The graph that runs last: a GPU's buckets have graphs of their own."""
        stages = self.program.bucket_stages(self.subject.final, self.work)
        return stages[-1] if stages else Stage("final", self.subject.final)

    # -- passes ---------------------------------------------------------------------------------------------------

    def _is_bad(self, stage: Stage) -> bool:
        self.tell(f"after {stage.name}")
        return not judge(stage, self.subject.params, self.work, self.own, self.exact).within

    def _pass(self) -> Verdict:
        s = self.subject
        self.tell("passes")
        stages = pipeline_stages(s)
        stages += self.program.bucket_stages(stages[-1].module, self.work)
        if not self._is_bad(stages[-1]):
            return Verdict(
                "unknown",
                "unknown. The artifact's final graph is wrong, but the passes make a right one of the same model now: "
                "another version of compilerllm made the artifact, or another checkpoint. Build it again.",
            )
        index = first_bad(stages, self._is_bad)
        before, after = stages[index - 1], stages[index]
        self.tell(f"the node in {after.name}")
        culprit = locate(before, after, s.params, self.work)
        error = judge(after, s.params, self.work, self.own, self.exact)
        was = judge(before, s.params, self.work, self.own, self.exact)
        place = ""
        if culprit is not None:
            place = f" of {culprit.path or '@' + culprit.function}, at the node {culprit.node}"
            if culprit.made:
                place += f", fed by {' and '.join(culprit.made)},"
        text = (
            f"pass {after.name} made the result{place} wrong: the logits' error against float32 went from {was.all.ours:.3g} "
            f"to {error.all.ours:.3g} ({error.all.allowed:.3g} is allowed)."
        )
        skippable, remedy = self._without(after.name, own_stage=index >= len(pipeline_stages(s)))
        return Verdict(
            "pass", text, pass_name=after.name, node=culprit.node if culprit else "",
            function=culprit.function if culprit else "", path=culprit.path if culprit else "",
            made=culprit.made if culprit else (),
            step=self.work.describe(culprit.step) if culprit and culprit.step < len(self.work.chunks) else "",
            remedy=remedy, skippable=skippable,
        )  # fmt: skip

    def _without(self, name: str, own_stage: bool) -> tuple[bool, str]:
        """Whether leaving a pass out makes the graph right, and what to tell the user."""
        s = self.subject
        if own_stage:
            return (
                False,
                "compile with --optimization-level 0; this pass belongs to the target and cannot be left out.",
            )
        if find_pass(name).level == 0:
            return False, "none: serving cannot do without this pass. Please report it."
        self.tell(f"without {name}")
        skip = s.options.skip | {name}
        options = Options(level=s.options.level, target=s.options.target, skip=skip)
        try:
            stages = pipeline_stages(s, options)
            right = judge(stages[-1], s.params, self.work, self.own, self.exact).within
        except IRError as error:
            return (
                False,
                f"compile with --optimization-level 0; without {name} the model is not served ({error}).",
            )
        if not right:
            return (
                False,
                f"compile with --optimization-level 0; without {name} the graph is still wrong: more is.",
            )
        names = ",".join(sorted(skip))
        return True, f"--skip-passes {names} (without it the graph is within the budget)."

    # -- kernels --------------------------------------------------------------------------------------------------

    def _kernel(self, report: Report, whole: Whole) -> None:
        runner = self.program.nodes()
        self.tell("kernels, node by node")
        checked = check_all(runner.module, runner.run(self.work))
        report.checked_nodes = len(checked)
        outside = [c for c in checked if not c.worst.within]
        report.nodes = [_line(c, self.work) for c in outside]
        self._layers(report, runner, checked)
        if outside and not whole.within:
            report.verdict = self._kernel_verdict(outside, runner)
            return
        if whole.within:
            report.verdict = Verdict("right", right_text(whole))
            if outside:
                report.notes.append(
                    f"{len(outside)} nodes are outside their own budget, which the logits do not show; the first is "
                    f"{outside[0].path}, run by {outside[0].templates}"
                )
            return
        report.verdict = self._memory(runner.logits, whole, checked)

    def _kernel_verdict(self, outside: Sequence[Checked], runner: object) -> Verdict:
        first = outside[0]
        spec = first.specs[0] if first.specs else None
        same = [c for c in outside if c.templates == first.templates]
        kernel = spec.template if spec is not None else "generated code"
        text = (
            f"kernel {first.templates} computes {first.result} of {first.path or '@' + first.function} wrong in a "
            f"{self.work.describe(first.number)}: on the inputs it had, its error against float32 is {first.worst.ours:.3g}, "
            f"where {first.worst.allowed:.3g} is allowed and the reference has {first.worst.own:.3g}. The node is {first.node}; "
            f"shapes {' '.join(first.shapes)}. {len(same)} of {len(outside)} nodes outside their budget run this kernel."
        )
        remedy = self._candidates(first, runner)
        return Verdict(
            "kernel", text, node=first.node, function=first.function, path=first.path, kernel=kernel, shapes=first.shapes,
            step=self.work.describe(first.number),
            remedy=remedy or "compile with --optimization-level 0, which runs torch's operators.",
        )  # fmt: skip

    def _candidates(self, first: Checked, runner: object) -> str:
        """Whether other candidates for the node's problem would be right."""
        from compilerllm.bisect.cuda_nodes import CudaNodes

        if not isinstance(self.program, CudaProgram) or not isinstance(runner, CudaNodes):
            return ""
        said = []
        for made in runner.choices_of(first.path, first.node)[:1]:
            for config in [c for c in made.candidates if c != made.chosen][:2]:
                self.tell(f"candidate {config}")
                other = self.program.make(False, {(made.family, made.problem): config})
                again = check_all(other.module, other.run(self.work))
                found = [c for c in again if c.path == first.path and c.op == first.op]
                right = all(c.worst.within for c in found)
                said.append(f"{made.family} {dict(config)} is {'right' if right else 'wrong too'}")
        return f"other candidates of this problem: {'; '.join(said)}." if said else ""

    # -- memory ---------------------------------------------------------------------------------------------------

    def _memory(self, apart: Sequence[Tensor], whole: Whole, checked: Sequence[Checked]) -> Verdict:
        self.tell("memory")
        overlaps = self.program.overlaps()
        alone = self.program.run_apart(self.work)
        right = measure_whole(alone if alone is not None else apart, self.own, self.exact).within
        if overlaps and right:
            first = overlaps[0]
            return Verdict(
                "memory",
                f"the memory plan is wrong: {first}. Every kernel is right by itself, and with no bytes used twice the model "
                f"is right. {len(overlaps)} such pairs in all.",
                function=first.function, node=first.node, values=(first.first, first.second),
                remedy="compile with --optimization-level 0.",
            )  # fmt: skip
        if right:
            return Verdict(
                "memory",
                "two values share bytes, or threads race: every kernel is right by itself, and so is the model once no bytes "
                f"are used twice, but no two values of the plan overlap. {self._race()}",
                remedy="compile with --optimization-level 0.",
            )  # fmt: skip
        near = max(checked, key=lambda c: c.worst.ratio, default=None)
        most = (
            f" The nearest to its budget is {near.path} ({near.worst.ratio:.2f} of it), run by {near.templates}."
            if near
            else ""
        )
        return Verdict(
            "unknown",
            f"unknown. The logits' error is {whole.all.ours:.3g} where {whole.all.allowed:.3g} is allowed, the graph is right, "
            f"and every kernel is within its own budget: small errors that add up.{most} {self._race()}",
            remedy="compile with --optimization-level 0.",
        )  # fmt: skip

    def _race(self) -> str:
        """What runs again, and with one thread, show."""
        if not isinstance(self.program, CpuArtifact):
            return ""
        first, again = (self.program.run(self.work) for _ in range(2))
        if any(not a.equal(b) for a, b in zip(first, again, strict=True)):
            return "Two runs differ: threads race."
        if measure_whole(self.program.run_alone(self.work), self.own, self.exact).within:
            return "With one thread it is right: threads race."
        return "Two runs give the same bits, with one thread too it is wrong."

    # -- layers ---------------------------------------------------------------------------------------------------

    def _layers(self, report: Report, runner: object, checked: Sequence[Checked] = ()) -> None:
        """The table layer by layer, of the module in which layers are calls."""
        self.tell("layers")
        s = self.subject
        exact = self._hidden(self.plain, wide=True)
        plain, graph = self._hidden(self.plain), self._hidden(Stage("final", s.final))
        kernels: dict[str, list[Tensor]] = {}
        for prefix, steps in getattr(runner, "layers", {}).items():
            kernels[prefix] = [_hidden_of(results) for results in steps]
        for prefix, want in exact.items():
            worst = [c.worst.ratio for c in checked if c.path == prefix or c.path.startswith(prefix + ".")]
            report.layers.append(
                LayerLine(
                    prefix, _relative(plain.get(prefix), want), _relative(graph.get(prefix), want),
                    _relative(kernels.get(prefix), want), max(worst, default=None),
                )
            )  # fmt: skip

    def _hidden(self, stage: Stage, wide: bool = False) -> dict[str, list[Tensor]]:
        """By layer, of each step: the residual stream behind it. A layer that hands on its last addends gives their sum."""
        found: dict[str, list[Tensor]] = {}

        def watch(site: Site, operands: Sequence[Runtime], results: Sequence[Runtime]) -> None:
            if site.node.op == "call":
                found.setdefault(site.node.text("params", ""), []).append(_hidden_of(results))

        evaluator = Evaluator(stage.module, self.subject.params, wide=wide, watch=watch)
        evaluator.run(self.work)
        return found


def _hidden_of(results: Sequence[Runtime]) -> Tensor:
    floats = [r.float() for r in results if isinstance(r, Tensor) and r.is_floating_point()]
    alike = [f for f in floats if f.shape == floats[0].shape]
    total: Tensor = sum(alike[1:], alike[0])
    return total


def _relative(ours: Sequence[Tensor] | None, exact: Sequence[Tensor]) -> float | None:
    """Error by the exact result's own size, over all steps."""
    if ours is None or [o.shape for o in ours] != [e.shape for e in exact]:
        return None
    import torch

    a, b = torch.cat([o.flatten() for o in ours]), torch.cat([e.flatten() for e in exact])
    size = rms(b)
    return rms(a - b) / size if size else None


def _line(c: Checked, work: Workload) -> NodeLine:
    spec = c.specs[0] if c.specs else None
    layer = next((p for p in _prefixes(c.path)), "")
    return NodeLine(
        c.node, c.path, layer, c.function, c.result, c.templates, c.op, dict(spec.config) if spec else {}, c.shapes,
        work.describe(c.number), c.worst.ours, c.worst.own, c.worst.allowed,
    )  # fmt: skip


def _prefixes(path: str) -> list[str]:
    """The layer a module path is in: up to its first number."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]
