"""First things first on a GPU: does the launcher do what it says. Under a minute; prints a line for each check.

    python -m benchmarks.gpu_smoke build FOLDER    compiles the kernels for sm_90; needs no GPU
    python -m benchmarks.gpu_smoke run FOLDER      runs them (builds first where FOLDER is empty)

Checked: kernels through our launcher against torch, one by one, with dependent launch, and in a graph; that dependent
launches keep their order; cuBLAS over the program's memory; a whole tiny model through the executable with the host a step
ahead; what a launch, a replay and a step cost the host; what graphs take of memory; that a faulty kernel is named.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from compilerllm.compiled_cuda import CudaModel, CudaOptions
from compilerllm.ir.step import Bucket
from compilerllm.kernels.launch.gpu.backend import CudaBackend
from compilerllm.kernels.launch.gpu.driver import CudaError
from compilerllm.kernels.launch.gpu.program import Addresses, Extent, Kernel, Launch, Plan, Pointer, Program

K, N = 4096, 4096
BUCKETS = (Bucket(1, 1, 1, 1), Bucket(256, 256, 256, 1), Bucket(64, 4, 4, 64))  # of the tiny model
TEXT = """
import triton
import triton.language as tl


@triton.jit
def gemv(x, w, o, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w0 = tl.load(w + n[:, None] * K + k[None, :])
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = w0.to(tl.float32) * tl.load(x + k)[None, :].to(tl.float32)
    for at in range(BK, K, BK):
        part = tl.load(w + n[:, None] * K + (at + k)[None, :])
        acc += part.to(tl.float32) * tl.load(x + at + k)[None, :].to(tl.float32)
    tl.store(o + n, tl.sum(acc, 1).to(o.dtype.element_ty))


@triton.jit
def count(x, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tl.store(x + i, tl.load(x + i, mask=i < n) * 3 + 1, mask=i < n)


@triton.jit
def stray(x, far, BLOCK: tl.constexpr):
    tl.store(x + far + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.int32))
"""
TYPES = {
    "gemv": ("*bf16", "*bf16", "*bf16"), "count": ("*i32", "i32"), "stray": ("*i32", "i64"),
}  # fmt: skip


@cache
def tiny() -> Any:
    """The tests' model of four kernels."""
    path = Path(__file__).parents[1] / "tests/kernels/gpu/tiny.py"
    spec = spec_from_file_location("tiny", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(folder: Path) -> None:
    """Compile what ``run`` needs into ``folder``."""
    from compilerllm.kernels.triton.build import compile_source
    from compilerllm.kernels.triton.emit_sampling import sampling_program
    from compilerllm.kernels.triton.source import KernelSource, argument_names, generated
    from compilerllm.kernels.triton.target import find_cuda_target

    (folder / "kernels").mkdir(parents=True, exist_ok=True)
    module = generated(TEXT)
    made: dict[str, Any] = {}
    kernels: list[Kernel] = []
    for name, warps, constants, pdl in (
        ("gemv", 4, {"K": K, "BN": 4, "BK": 1024, "PDL": False}, False),
        ("gemv", 4, {"K": K, "BN": 4, "BK": 1024, "PDL": True}, True),
        ("count", 4, {"BLOCK": 1024, "PDL": False}, False),
        ("count", 4, {"BLOCK": 1024, "PDL": True}, True),
        ("stray", 1, {"BLOCK": 32}, False),
    ):
        template = f"{module}:{name}"
        names = [n for n in argument_names(template) if n not in constants]
        source = KernelSource.of(
            template, dict(zip(names, TYPES[name], strict=True)), constants, num_warps=warps, pdl=pdl
        )
        code, meta = compile_source(source, 90)
        (folder / f"kernels/{source.key()}.cubin").write_bytes(code)
        kernels.append(Kernel(meta["name"], source.key(), name, TYPES[name], warps, meta["shared"], pdl))
    made["kernels"] = Program(tuple(kernels), ()).to_json()
    target, rows = find_cuda_target("sm_90"), sorted({b.rows for b in BUCKETS})
    for level in (1, 2):  # dependent launches from level 2 on
        sampling, cubins = sampling_program(tiny().VOCAB, rows, target, level, folder / "cache")
        for cubin in cubins.values():
            (folder / f"kernels/{cubin.key}.cubin").write_bytes(cubin.file.read_bytes())
        made[f"level {level}"] = {
            "kernels": Program(tiny().make_kernels(folder, level == 2), ()).to_json(),
            "sampling": sampling.to_json(),
        }
    (folder / "smoke.json").write_text(json.dumps(made))


def ok(what: str, passed: bool, detail: str = "") -> None:
    """One line of the report; a failure ends the run."""
    print(f"{'OK' if passed else 'FAILED'}  {what}{'  ' + detail if detail else ''}", flush=True)
    if not passed:
        sys.exit(1)


def milliseconds(work: Callable[[], None], backend: CudaBackend, repeats: int = 20) -> float:
    """Median time on the device."""
    times = []
    with backend.here():
        for _ in range(repeats):
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            a.record()
            work()
            b.record()
            b.synchronize()
            times.append(float(a.elapsed_time(b)))
    return statistics.median(times)


class Smoke:
    """The kernels loaded, and memory for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made = json.loads((folder / "smoke.json").read_text())
        self.backend = CudaBackend(90)
        matmul = Kernel(
            "", "", "library:matmul", ("*bf16", "*bf16", "*fp32", "i32"), constexprs=(("k", K), ("n", N))
        )
        self.kernels = (*Program.from_json(self.made["kernels"]).kernels, matmul)
        start = time.perf_counter()
        self.program = self.backend.load(Program(self.kernels, ()), folder)
        ok("cubins loaded", True, f"{1e3 * (time.perf_counter() - start) / 5:.2f} ms each")
        g = torch.Generator("cuda").manual_seed(1)
        self.weights = self.backend.allocate(16 * K * N * 2, "weights")
        self.w = self.weights.view(torch.bfloat16).view(16, N, K)
        self.w.copy_(torch.randn(16, N, K, device="cuda", generator=g, dtype=torch.bfloat16) * 0.02)
        self.x = self.backend.allocate(K * 2 * 8, "x").view(torch.bfloat16).view(8, K)
        self.x.copy_(torch.randn(8, K, device="cuda", generator=g, dtype=torch.bfloat16))
        self.out = self.backend.allocate(N * 4 * 8, "out")
        self.numbers = self.backend.allocate(4 << 20, "numbers").view(torch.int32)
        torch.cuda.synchronize()
        self.where = Addresses(
            params={"w": self.weights.data_ptr()}, arena=self.x.data_ptr(), logits=self.out.data_ptr(),
            counters=self.numbers.data_ptr(),
        )  # fmt: skip

    def plan(self, launches: Sequence[Launch], tokens: int = 1) -> Any:
        """Launches bound to the memory."""
        return self.program.bind(Plan(Bucket(tokens, 1, 1, 1), 0, tuple(launches)), self.where)

    def gemv(self, pdl: bool, layer: int = 0) -> Launch:
        """x @ w[layer].T."""
        w = Pointer("param", "w", layer * K * N * 2)
        return Launch(int(pdl), (N // 4, 1, 1), (Pointer("arena"), w, Pointer("logits")), "gemv")

    def check_kernels(self) -> None:
        """One by one, and in a graph."""
        expected = self.x[0].float() @ self.w[0].float().t()
        out = self.out.view(torch.bfloat16)[:N]
        for pdl in (False, True):
            plan = self.plan([self.gemv(pdl)])
            for captured in (False, True):
                out.fill_(float("nan"))
                torch.cuda.synchronize()
                plan.run_checked(self.backend.synchronize)
                if captured:
                    replay = self.backend.capture(plan.run)
                    out.fill_(float("nan"))
                    torch.cuda.synchronize()
                    replay()
                    self.backend.synchronize()
                error = ((out.float() - expected).norm() / expected.norm()).item()
                ok(f"gemv pdl={pdl} graph={captured}", error < 0.005, f"relative error {error:.2g}")

    def check_order(self) -> None:
        """x = 3x + 1, 300 times: any launch that starts too early changes the number."""
        value = 1
        for _ in range(300):
            value = (value * 3 + 1) & 0xFFFFFFFF
        signed = value - (1 << 32) if value >> 31 else value
        for pdl in (False, True):
            launch = Launch(2 + pdl, (1024, 1, 1), (Pointer("counters"), 1 << 20), "count")
            plan = self.plan([launch] * 300)
            self.numbers.fill_(1)
            torch.cuda.synchronize()
            self.backend.capture(plan.run)()
            self.backend.synchronize()
            ok(f"order of 300 dependent launches pdl={pdl}", bool((self.numbers == signed).all()))

    def check_library(self) -> None:
        """cuBLAS, bf16 to f32, by itself and in a graph."""
        plan = self.plan(
            [Launch(5, (1, 1, 1), (Pointer("arena"), Pointer("param", "w"), Pointer("logits"), Extent("T")))],
            8,
        )
        expected = self.x.float() @ self.w[0].float().t()
        out = self.out.view(torch.float32).view(8, N)
        plan.run()
        for captured in (False, True):
            out.fill_(float("nan"))
            torch.cuda.synchronize()
            (self.backend.capture(plan.run) if captured else plan.run)()
            self.backend.synchronize()
            error = ((out - expected).norm() / expected.norm()).item()
            ok(f"matmul bf16 to f32 graph={captured}", error < 1e-4, f"relative error {error:.2g}")

    def times(self) -> None:
        """Host time of a launch and of a replay; bandwidth; memory of graphs."""
        for pdl in (False, True):
            plan = self.plan([self.gemv(pdl, i % 16) for i in range(300)])
            plan.run()
            self.backend.synchronize()
            start = time.perf_counter()
            plan.run()
            host = time.perf_counter() - start
            self.backend.synchronize()
            replay = self.backend.capture(plan.run)
            for _ in range(3):
                replay()
            self.backend.synchronize()
            took = milliseconds(replay, self.backend)
            start = time.perf_counter()
            replay()
            once = time.perf_counter() - start
            self.backend.synchronize()
            print(
                f"    pdl={pdl}: {1e6 * host / 300:.2f} us of host time a launch, {1e6 * once:.1f} us a replay of 300; "
                f"{300 * K * N * 2 / took / 1e9:.2f} TB/s, {1e3 * took / 300:.2f} us a kernel",
                flush=True,
            )
            sizes, graphs = [self.backend.memory()[0]], []
            for length in (300, 1):
                short = self.plan([self.gemv(pdl, i % 16) for i in range(length)])
                graphs += [self.backend.capture(short.run) for _ in range(20)]
                sizes.append(self.backend.memory()[0])
            long, little = (sizes[0] - sizes[1]) / 20, (sizes[1] - sizes[2]) / 20
            print(
                f"    graph memory: {long:,.0f} bytes with 300 nodes, {little:,.0f} with 1 (averages of 20)"
            )

    def check_fault(self) -> None:
        """Last: the context does not survive it."""
        stray = Launch(
            4, (1, 1, 1), (Pointer("counters"), 1 << 44), "%7 = scatter(%x)  [model.layers.3.self_attn]"
        )
        plan = self.plan([self.gemv(False), stray, self.gemv(False)])
        try:
            plan.run_checked(self.backend.synchronize)
        except CudaError as error:
            ok("a faulty kernel is named", "[model.layers.3.self_attn]" in str(error), str(error))
        else:
            ok("a faulty kernel is named", False, "nothing was raised")


def check_model(folder: Path, made: dict[str, Any], level: int) -> None:
    """Tokens of a tiny model, the host a step ahead, with graphs and without; then what a step costs the host."""
    model_of_tests = tiny()
    greedy, step_of = model_of_tests.greedy, model_of_tests.step_of
    place = folder / f"tiny{level}"
    place.mkdir(exist_ok=True)
    if not (place / "kernels").exists():
        (place / "kernels").symlink_to((folder / "kernels").resolve())
    model_of_tests.write_artifact(
        place, BUCKETS, 2048, Program.from_json(made["kernels"]).kernels, Program.from_json(made["sampling"])
    )  # fmt: skip
    for options in (CudaOptions(), CudaOptions(graphs=False)):
        model = CudaModel.load(place, model_of_tests.IdentitySource(), options=options)
        model.allocate(1024, 256)
        prompts, blocks = {0: [3, 5], 2: [1] * 31}, {0: [6], 2: [1, 4]}
        pending = [model.enqueue(step_of([(s, p, 0, blocks[s]) for s, p in prompts.items()]), greedy([0, 2]))]
        tokens: dict[int, list[int]] = {0: [], 2: []}
        for n in range(12):
            ahead = step_of([(s, [-1 - s], len(p) + n, blocks[s]) for s, p in prompts.items()])
            pending.append(model.enqueue(ahead, greedy([0, 2])))
            sampled = pending.pop(0).result()
            assert sampled is not None
            for slot, token in zip(prompts, sampled.token_ids.tolist(), strict=True):
                tokens[slot].append(token)
        pending.pop().result()
        expected = {}
        for slot, prompt in prompts.items():
            total, expected[slot] = sum(prompt), list[int]()
            for _ in range(12):
                expected[slot].append(total % model_of_tests.VOCAB)
                total += expected[slot][-1]
        ok(f"tiny model level={level} graphs={options.graphs}", tokens == expected, f"{tokens}")
        for count in (1, 256):
            step, rows = (
                step_of([(s, [-1 - s], 40, [s, s + 256]) for s in range(count)]),
                greedy(range(count)),
            )
            took = []
            for _ in range(30):
                start = time.perf_counter()
                waiting = model.enqueue(step, rows)
                took.append(time.perf_counter() - start)
                waiting.result()
            print(
                f"    enqueue of {count} sequences: {1e6 * statistics.median(took):.0f} us of host time",
                flush=True,
            )
    plan = model.memory_plan(256)
    print(f"    predicted memory: {plan.text()}")


def run(folder: Path) -> None:
    """All checks, the fatal one last."""
    if not (folder / "smoke.json").exists():
        build(folder)
    smoke = Smoke(folder)
    facts = smoke.backend.facts
    print(
        f"    {facts.name}, sm_{facts.capability}, driver for CUDA {facts.driver}, torch {torch.__version__}"
    )
    smoke.check_kernels()
    smoke.check_order()
    smoke.check_library()
    smoke.times()
    for level in (1, 2):
        check_model(folder, smoke.made[f"level {level}"], level)
    smoke.check_fault()
    print("all OK")


if __name__ == "__main__":
    {"build": build, "run": run}[sys.argv[1]](Path(sys.argv[2]))
