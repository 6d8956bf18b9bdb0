"""Which pass: the first whose module leaves the budget in the reference, and the node at which its graph goes wrong."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from compilerllm.bisect.budget import Whole, measure_whole
from compilerllm.bisect.evaluate import Evaluator, Site, Watch
from compilerllm.bisect.known import Blame, Known
from compilerllm.bisect.parameters import Parameters
from compilerllm.bisect.workload import Workload
from compilerllm.ir.graph import Module, Node, Value
from compilerllm.ir.text import print_node
from compilerllm.kernels.groups import paged_windows
from compilerllm.kernels.refs import VIEW_OPS


@dataclass(frozen=True)
class Stage:
    """The model after a pass. ``on_decode``: where decode steps run another module, as a GPU's do."""

    name: str
    module: Module
    on_decode: Module | None = None


@dataclass(frozen=True)
class Culprit:
    """A node of the graph after a pass: its text, its function, the module of the model it comes from, and the step.

    made: the nearest nodes that feed it and that the pass made, where it did not make the node itself.
    """

    node: str
    function: str
    path: str
    step: int
    made: tuple[str, ...] = ()


def run_stage(
    stage: Stage, params: Parameters, work: Workload, *, wide: bool = False,
    watches: Sequence[Watch] | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """Logits of every step of a workload, one by one. ``watches``: one for each."""
    plain = Evaluator(stage.module, params, wide=wide)
    if not plain.serves:
        logits = []
        for number, sequence in enumerate(work.sequences):
            plain.watch = watches[number] if watches is not None else None
            logits.append(plain.run_tokens(sequence))
        yield from work.by_step(logits)
        return
    decode = plain if stage.on_decode is None else Evaluator(stage.on_decode, params, wide=wide)
    states = plain.states(work)
    for number, step in enumerate(work.steps(len(paged_windows(stage.module)))):
        runner = decode if step.max_query == 1 else plain
        runner.watch = watches[number] if watches is not None else None
        yield runner.run_step(step, states)


def judge(
    stage: Stage, params: Parameters, work: Workload, own: Sequence[Tensor], exact: Sequence[Tensor]
) -> Whole:
    """A stage's logits, computed by the reference, against the budget."""
    return measure_whole(list(run_stage(stage, params, work)), own, exact)


def first_bad(stages: Sequence[Stage], is_bad: Callable[[Stage], bool]) -> int:
    """Index of the first bad stage, where the first is good and the last is bad.

    Halving: later passes do not undo a fault. Should one do so, what is found is the last fault that stays.
    """
    low, high = 0, len(stages) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if is_bad(stages[middle]):
            high = middle
        else:
            low = middle
    return high


def locate(before: Stage, after: Stage, params: Parameters, work: Workload) -> Culprit | None:
    """Where ``after`` first computes what ``before`` does not, over the steps. None where no logits are unknown.

    Stages that do not both serve are compared sequence by sequence, each as one step.
    """
    serve = [Evaluator(stage.module, params).serves for stage in (before, after)]
    works = [work] if all(serve) else [Workload((s,), ((len(s),),)) for s in work.sequences]
    for run in works:
        count = len(run.chunks)
        known = [Known() for _ in range(count)]
        wanted = list(run_stage(before, params, run, watches=[k.remember for k in known]))
        for logits, knows in zip(wanted, known, strict=True):
            knows.add(logits)
        blames = [Blame(k) for k in known]
        found = run_stage(after, params, run, watches=[b.look for b in blames])
        for number, (logits, blame) in enumerate(zip(found, blames, strict=True)):
            if not known[number].has(logits) and (site := blame.latest) is not None:
                return Culprit(
                    _text(site.node), site.graph.name, site.path, number, _made_by(after.name, site)
                )
    return None


def _made_by(name: str, site: Site) -> tuple[str, ...]:
    """Nodes that pass ``name`` touched last, upstream of a node, none behind another; empty if it touched the node."""
    makers = site.graph.producers()

    def touched(node: Node) -> bool:
        return node.origin.passes[-1:] == (name,)

    found: dict[Node, None] = {}
    pending = [] if touched(site.node) else list(site.node.operands)
    seen: set[Value] = set()
    while pending:
        value = pending.pop(0)
        node = makers.get(value)
        if value in seen or node is None:
            continue
        seen.add(value)
        if touched(node) and node.op not in VIEW_OPS:
            found[node] = None
        else:
            pending += node.operands
    return tuple(_text(n) for n in list(found)[:3])


def _text(node: Node) -> str:
    return print_node(node).strip()
