"""A report with everything that a page must show: real passes over a small decoder, made-up times, hostile names."""

from dataclasses import replace

from compilerllm.cuda_artifact import flat_module, prepare_bucket
from compilerllm.explain.report import (
    BucketReport,
    Candidate,
    IRNode,
    Kernel,
    Launch,
    Machine,
    Miss,
    Pick,
    Report,
    StepTime,
)
from compilerllm.explain.trace import Trace, describe_node
from compilerllm.ir.graph import Module
from compilerllm.ir.step import Bucket
from compilerllm.passes.pipeline import Options
from tests.passes.captured import Decoder

MACHINE = Machine("sm_90", "H200", 4000.0, 750.0, 1.5, "typical of H200")
HOSTILE = (
    """</script><script>window.hacked = 1</script><img src=x onerror="window.hacked=1">'"&amp;{{title}}"""
)
LAYERS = 3
UNBROKEN = "a" * 160  # a name that offers no place to break a line
_VIEWS = ("reshape", "permute", "slice", "step_field")


def make_report(decode: tuple[int, ...] = (1, 8, 64), layers: int = LAYERS, hidden: int = 32) -> Report:
    """Decode buckets of so many tokens, of which the second has times, one with prompts, one of sampling."""
    trace = Trace()
    names = tuple(f"decode-{t}" for t in decode)
    captured = Decoder(layers=layers, hidden=hidden, qk_norm=True).module()
    module = trace.pipeline(captured, Options(level=2, target="sm_90"))
    flat = flat_module(module, trace.rewrites(module))
    for tokens, query, same in ((decode[0], 1, names), (512, 512, ("mixed-512",))):
        rows = min(tokens, 64)
        of_bucket = prepare_bucket(flat, Bucket(tokens, rows, rows, query), trace.rewrites(flat, same))

    first = trace.runs[0]
    miss = Miss(
        "main", f'%y = rms_norm(%x, note="{HOSTILE}")', f"{HOSTILE} has other uses", f"m.{HOSTILE}.{UNBROKEN}"
    )
    plain = [
        Miss("layer", f"%a_{i} = add(%x, %y)", f"%x_{i} has other uses", f"layers.{i}") for i in range(7)
    ]
    runs = (replace(first, misses=(miss, *plain)), *trace.runs[1:])

    nodes = _nodes(of_bucket)
    nodes[0] = replace(nodes[0], path=f"model.{HOSTILE}.{UNBROKEN}", text=f"{nodes[0].text}  {HOSTILE}")
    kernels = _kernels(nodes)
    picks = (
        Pick("linear", "K=32,M=8,N=64,dtype=bf16", {"BN": 64, "warps": 4}, "timed", 2.25, "", (
            Candidate({"BN": 32, "warps": 4}, 2.5), Candidate({"BN": 128, "warps": 8}, 3.125),
            *(Candidate({"BN": 16, "warps": w}) for w in range(1, 9)),
        )),
        Pick("linear", "K=64,M=8,N=32", {"path": "cublas"}, "only candidate"),
    )  # fmt: skip
    buckets = [
        _bucket(name, "decode", t, nodes, kernels, timed=place == 1)
        for place, (name, t) in enumerate(zip(names, decode, strict=True))
    ]
    buckets.append(_bucket("mixed-512", "mixed", 512, nodes, kernels, timed=False))
    kernel = Kernel("sample:greedy", "triton", "sampling", {"BLOCK": 1024}, 4)
    node = IRNode("sample_greedy(%logits)", "sample_greedy", "sampling", "")
    launch = Launch(len(kernels), len(nodes), -1, 4096.0, 0.0, 0.001, 2.125)
    for i, bucket in enumerate(buckets[: len(decode)]):
        buckets[i] = replace(bucket, sampling="sampling-greedy-64")
    buckets.append(BucketReport("sampling-greedy-64", "sampling", 64, 64, 64, 0, (64, 64, 64, 1), 4096, (launch,)))  # fmt: skip
    texts = tuple(t.replace("model.embed_tokens", f"model.{UNBROKEN}") for t in trace.texts)
    return Report(
        f"tiny {HOSTILE}", "ab12" * 16, "0.1.0", 2, "bf16", layers, MACHINE, texts, runs, (*nodes, node),
        (*kernels, kernel), picks, tuple(buckets), (f"a note: {HOSTILE}",), {"capture": 1.25, "compile": 60.0},
    )  # fmt: skip


def _nodes(module: Module) -> list[IRNode]:
    described = [describe_node(n, module.main, module) for n in module.main.nodes if n.op not in _VIEWS]
    return [replace(n, sources=(f"aten.{n.op}.default",)) for n in described]


def _kernels(nodes: list[IRNode]) -> list[Kernel]:
    """One an op; every second comes from a library."""
    ops = list(dict.fromkeys(n.op for n in nodes))
    return [
        Kernel(f"{op}:{op}" if i % 2 else f"library:{op}", "triton" if i % 2 else "library", op, {"BLOCK": 128 << i % 3},
               num_warps=4, shared_bytes=1024 * i, dependent=i % 2 > 0, key=f"{i:040x}")
        for i, op in enumerate(ops)
    ]  # fmt: skip


def _bucket(
    name: str, kind: str, tokens: int, nodes: list[IRNode], kernels: list[Kernel], timed: bool
) -> BucketReport:
    """A launch a node, two for each linear; gaps of a quarter microsecond where there are times."""
    places = {k.template.partition(":")[2]: i for i, k in enumerate(kernels)}
    launches: list[Launch] = []
    now = 0.0
    for i, node in enumerate(nodes):
        nbytes = 0.0 if node.op == "call" else 50_000.0 * (1 + i % 7) + 1000.0 * tokens
        flops = 0.0 if node.op in ("embedding", "gather_rows") else 900.0 * tokens * (1 + i % 5) ** 3
        work = [(nbytes, flops), (0.0, 0.0)] if node.op.startswith("linear") else [(nbytes, flops)]
        for b, f in work:
            roofline = MACHINE.roofline_us(b, f)
            predicted = 1.5 + 1.25 * roofline
            measured = predicted * (1 + (i % 4) / 16) if timed else None
            pick = (i % 2 if b else -1) if node.op.startswith("linear") else -1
            start = now if timed else None
            launches.append(
                Launch(places[node.op], i, pick, b, f, roofline, predicted, measured, start)
            )  # fmt: skip
            now += (measured or 0.0) + 0.25
    step = None
    if timed:
        spent = sum(x.measured_us or 0.0 for x in launches)
        step = StepTime(now + 2.0, spent, now + 2.0 - spent - 1.5, 20, {"copying inputs": 1.5})
    bounds = (tokens, min(tokens, 64), min(tokens, 64), 1 if kind == "decode" else tokens)
    return BucketReport(
        name, kind, tokens, min(tokens, 64), min(tokens, 64), 256, bounds, 65536, tuple(launches), "", step
    )
