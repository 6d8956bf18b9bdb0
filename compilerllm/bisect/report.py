"""What bisect found, as data: the comparison, a line a layer, the verdict; with its JSON form and its text for people."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from compilerllm.bisect.budget import ALLOWED, Measure, Whole

# right: within the budget. pass, kernel, memory: what is wrong. capture: the graph before any pass. unknown: out of budget, cause not found.
Kind = Literal["right", "pass", "kernel", "memory", "unknown"]
FORMAT = 1


@dataclass(frozen=True)
class LayerLine:
    """One layer: error of its result against float32, relative to the result: of the reference in the model's dtype, of
    the final graph in the reference, and of the kernels (None where that was not run); and its worst node alone, by what
    is allowed there."""

    path: str
    reference: float | None
    graph: float | None
    kernels: float | None = None
    worst_node: float | None = None


@dataclass(frozen=True)
class NodeLine:
    """A node outside its budget, alone on its own inputs. ``error`` and ``allowed`` are root mean squares."""

    node: str
    path: str
    layer: str
    function: str
    result: str
    kernel: str
    op: str
    config: dict[str, str]
    shapes: tuple[str, ...]
    step: str
    error: float
    reference_error: float
    allowed: float


@dataclass(frozen=True)
class Verdict:
    """What is wrong. The fields that do not apply to ``kind`` are empty."""

    kind: Kind
    text: str
    pass_name: str = ""
    node: str = ""
    function: str = ""
    path: str = ""
    made: tuple[str, ...] = ()  # pass: nodes of its making that feed ``node``
    kernel: str = ""
    shapes: tuple[str, ...] = ()
    step: str = ""
    values: tuple[str, ...] = ()  # memory: the values that share bytes
    remedy: str = ""
    skippable: bool = False  # whether leaving the pass out makes the model right


@dataclass
class Report:
    """One run of bisect."""

    model: str
    target: str
    level: int
    dtype: str
    tokens: tuple[int, ...]  # of each sequence
    steps: tuple[str, ...]
    whole: Whole
    verdict: Verdict = field(default_factory=lambda: Verdict("right", ""))
    ran_as: str = ""  # what executed the program
    layers: list[LayerLine] = field(default_factory=list)
    nodes: list[NodeLine] = field(default_factory=list)
    checked_nodes: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return self.verdict.kind == "right"

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``format`` changes when fields do."""
        whole = self.whole
        return {
            "format": FORMAT, "model": self.model, "target": self.target, "level": self.level, "dtype": self.dtype,
            "ran_as": self.ran_as, "sequences": list(self.tokens),
            "logits": _measure(whole.all) | {
                "worst_row": _measure(whole.worst_row), "same_likeliest_token": whole.agree,
                "steps": [{"step": s} | _measure(m) for s, m in zip(self.steps, whole.steps, strict=True)],
            },
            "verdict": asdict(self.verdict), "layers": [asdict(x) for x in self.layers],
            "nodes_checked": self.checked_nodes, "nodes": [asdict(n) for n in self.nodes], "notes": self.notes,
        }  # fmt: skip

    def text(self) -> str:
        """For people."""
        lines = [
            f"model    {self.model}, {self.dtype}, level O{self.level}, {self.target} ({self.ran_as})",
            f"compared {' and '.join(map(str, self.tokens))} tokens in {len(self.steps)} steps, every row; float32 is the truth, "
            "O0 in the same dtype the yardstick",
            "",
            *_table(["logits", "error", "O0's error", "allowed", ""], [
                [name, _number(m.ours), _number(m.own), _number(m.allowed), "" if m.within else "OUTSIDE"]
                for name, m in [
                    ("all rows", self.whole.all), *zip(self.steps, self.whole.steps, strict=True),
                    ("the worst row", self.whole.worst_row),
                ]
            ]),
            f"The likeliest token is float32's in {self.whole.agree:.1%} of the rows.",
        ]  # fmt: skip
        if self.layers:
            header = [
                "layer (error against float32, relative)",
                "O0",
                "graph",
                "kernels",
                "worst node / allowed",
            ]
            rows = [
                [x.path, *(_percent(v) for v in (x.reference, x.graph, x.kernels)), _number(x.worst_node)]
                for x in self.layers
            ]
            lines += ["", *_table(header, rows)]
        if self.nodes:
            header = ["node outside its budget", "kernel", "error", "allowed"]
            rows = [
                [f"{n.path}: {_short(n.node)}", n.kernel, _number(n.error), _number(n.allowed)]
                for n in self.nodes
            ]
            lines += ["", *_table(header, rows[:12])]
            if len(rows) > 12:
                lines.append(f"... and {len(rows) - 12} more")
        lines += ["", *(f"note: {n}" for n in self.notes), f"verdict: {self.verdict.text}"]
        if self.verdict.remedy:
            lines.append(f"way around: {self.verdict.remedy}")
        return "\n".join(lines)


def right_text(whole: Whole) -> str:
    """The verdict's sentence where nothing is wrong."""
    m = whole.all
    by = f"{m.ours / m.own:.2f} times" if m.own else "no"
    return (
        f"right. The optimized model strays from float32 by {m.ours:.3g}, {by} O0's own error in the same dtype "
        f"({ALLOWED} times is allowed)."
    )


def _measure(m: Measure) -> dict[str, Any]:
    return {"error": m.ours, "reference_error": m.own, "allowed": m.allowed, "within": m.within}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.3%}"


def _short(node: str, width: int = 60) -> str:
    text = node.partition(" : ")[0]
    return text if len(text) <= width else text[: width - 3] + "..."


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        first, *rest = (
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *rest]).rstrip()

    return [line(header), *map(line, rows)]
