"""The sampling program: plans by variant and number of rows, apart from any graph, which joins a step's behind its forward.

Variants are "greedy", "sampled" (temperature, top-k, top-p, min-p) and "full" (also penalties, biases, masks, scores and
log-probabilities; few rows at a time, since it changes a copy of the logits). ``GpuSampler`` runs them and says what
its tables hold.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from compilerllm.ir.step import Bucket
from compilerllm.kernels.launch.gpu.program import Extent, Pointer, Program
from compilerllm.kernels.launch.gpu.sampling import FULL, FULL_ROWS, GREEDY, SAMPLED, TOP
from compilerllm.kernels.spec import KernelSpec
from compilerllm.kernels.triton.build import Cubin, build_kernels
from compilerllm.kernels.triton.emit import ProgramDraft, finish_program
from compilerllm.kernels.triton.emitter import Call, Emitted, Memory
from compilerllm.kernels.triton.source import ConstValue, KernelSource, argument_names
from compilerllm.kernels.triton.target import CudaTarget

BLOCK = 1024  # columns of a row that a program reads at a time
LIST = 4096  # columns of a row that may survive top-k and top-p, before its cuts are found in the row itself
TOPS = 2048  # groups of a row whose largest values bound its cuts
MOST_SPLITS, FEWEST_SPLITS = (
    32,
    4,
)  # programs a row; greedy, which reads a row once, takes up to twice as many
Typed = tuple[Pointer, str]


def draft_sampling(
    vocab: int, row_buckets: Sequence[int], target: CudaTarget, level: int = 2
) -> tuple[ProgramDraft, tuple[str, ...]]:
    """Everything emitted, nothing compiled; and the plans' variants in order."""
    made, variants, most = [], [], max(row_buckets)
    for rows in row_buckets:
        for variant in (GREEDY, SAMPLED):
            made.append(_Emitter(vocab, rows, most, target, level, variant).emit())
            variants.append(variant)
    made.append(_Emitter(vocab, min(FULL_ROWS, most), most, target, level, FULL).emit())
    return ProgramDraft(target, tuple(made)), (*variants, FULL)


def finish_sampling(
    draft: ProgramDraft, variants: Sequence[str], cubins: Mapping[KernelSource, Cubin] | None = None
) -> Program:
    """The program; without ``cubins`` it can only be interpreted."""
    program = finish_program(draft, cubins)
    plans = tuple(replace(p, variant=v) for p, v in zip(program.plans, variants, strict=True))
    return replace(program, plans=plans)


def sampling_program(
    vocab: int, row_buckets: Sequence[int], target: CudaTarget, level: int, cache: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Program, dict[KernelSource, Cubin]]:  # fmt: skip
    """Compiled: for each of ``row_buckets`` greedy and sampled, and one full. Raises ``KernelBuildError``."""
    draft, variants = draft_sampling(vocab, row_buckets, target, level)
    cubins = build_kernels(draft.sources(), target, cache, on_progress)
    return finish_sampling(draft, variants, cubins), cubins


class _Emitter:
    """One variant at one number of rows."""

    def __init__(
        self, vocab: int, rows: int, most: int, target: CudaTarget, level: int, variant: str
    ) -> None:
        """``rows`` of this variant; ``most`` of any step, which is how wide the host's results are."""
        self.vocab, self.rows, self.most, self.target, self.variant = vocab, rows, most, target, variant
        self.pdl = target.pdl and level >= 2
        self.out = Emitted(Bucket(rows, rows, rows, 1))
        wanted = -(-8 * target.sms // rows)
        most = MOST_SPLITS * (2 if variant == GREEDY else 1)
        splits = min(most, max(FEWEST_SPLITS, 1 << (wanted - 1).bit_length()))
        self.splits = splits if variant != FULL else MOST_SPLITS
        self.span = -(-vocab // self.splits)
        self.meta: Typed = (Pointer("table", "row_meta"), "i32")
        self.params: Typed = (Pointer("table", "rows"), "i32")
        self.sampled: Typed = (Pointer("table", "sampled"), "i32")
        self.written: dict[str, Typed] = {
            "sampled": self.sampled, "results": (Pointer("table", "results"), "i32"),
            "ring": (Pointer("table", "ring"), "i32"), "last_token": (Pointer("table", "last_token"), "i32"),
        }  # fmt: skip
        self.raw: Typed = (Pointer("logits"), "fp32")

    def emit(self) -> Emitted:
        match self.variant:
            case "greedy":
                self._greedy()
            case "sampled":
                self._choose(self.raw)
            case _:
                self._full()
        return self.out

    def _greedy(self) -> None:
        self._launch(
            "sampling:greedy", (self._r, self.splits),
            {"logits": self.raw, "slots": (Pointer("table", "row_slots"), "i32"), **self.written, "partial": self._memory("partial", "i64", self.splits), "counters": self._counters()},
            {"SPAN": self.span, "SPLITS": self.splits, "ROWS": self.most, "BLOCK": BLOCK},
        )  # fmt: skip

    def _choose(self, logits: Typed) -> None:
        splits, groups = self.splits, TOPS // self.splits
        span = {"SPAN": self.span, "SPLITS": splits, "BLOCK": BLOCK}
        common = {"params": self.params, "meta": self.meta}
        codes, tops = self._memory("codes", "i64", splits), self._memory("tops", "fp32", TOPS)
        sums, bounds = self._memory("sums", "fp32", splits), self._memory("bounds", "fp32", 4)
        masses = self._memory("masses", "fp64", splits)
        listed = {
            "list_x": self._memory("list_x", "fp32", LIST), "list_id": self._memory("list_id", "i32", LIST),
            "used": self._memory("used", "i32", 1),
        }  # fmt: skip
        self._launch(
            "sampling:survey", (self._r, splits), {"logits": logits, **common, "codes": codes, "tops": tops, "sums": sums},
            {**span, "GROUPS": groups},
        )  # fmt: skip
        self._launch(
            "sampling:bound", (self._r,),
            {**common, "codes": codes, "tops": tops, "sums": sums, "bounds": bounds, "used": listed["used"]},
            {"SPLITS": splits, "GROUPS": groups, "STEPS": 12, "RANGE": 64.0},
        )  # fmt: skip
        self._launch(
            "sampling:collect", (self._r, splits), {"logits": logits, **common, "bounds": bounds, "masses": masses, **listed},
            {**span, "LIST": LIST},
        )  # fmt: skip
        self._launch(
            "sampling:draw", (self._r,),
            {"logits": logits, **common, "codes": codes, "bounds": bounds, "masses": masses, **listed,
             **self.written},
            {**span, "LIST": LIST, "ROWS": self.most}, num_warps=8,
        )  # fmt: skip

    def _full(self) -> None:
        copy = self._memory("adjusted", "fp32", self.vocab)
        common = {"params": self.params, "meta": self.meta}
        counts: Typed = (Pointer("table", "output_counts"), "i16")
        self._launch(
            "penalties:adjust", (self._r, self.splits),
            {"logits": self.raw, **common, "prompt_seen": (Pointer("table", "prompt_seen"), "u8"),
             "output_counts": counts, "adjusted": copy},
            {"SPAN": self.span, "BLOCK": BLOCK},
        )  # fmt: skip
        self._launch(
            "penalties:add_bias", (self._r,),
            {**common, "tokens": (Pointer("table", "bias_token"), "i32"), "adjusted": copy,
             "values": (Pointer("table", "bias_value"), "fp32")},
            {"BLOCK": 128},
        )  # fmt: skip
        self._launch(
            "penalties:mask_out", (self._r, self.splits),
            {"meta": self.meta, "masks": (Pointer("table", "masks"), "i32"), "adjusted": copy},
            {"WORDS": -(-self.vocab // 32), "SPAN": self.span, "BLOCK": BLOCK},
        )  # fmt: skip
        self._choose(copy)
        self._launch(
            "penalties:take_target", (self._r,), {**common, "sampled": self.sampled}, {}, num_warps=1
        )
        self._launch(
            "penalties:count_token", (self._r,), {**common, "sampled": self.sampled, "output_counts": counts}, {}, num_warps=1
        )  # fmt: skip
        parts = {
            "best": self._memory("best", "i64", self.splits * TOP), "peaks": self._memory("peaks", "fp32", self.splits),
            "sums": self._memory("score_sums", "fp32", self.splits), "larger": self._memory("larger", "i32", self.splits),
        }  # fmt: skip
        shape = {"SPLITS": self.splits, "TOP2": TOP}
        self._launch(
            "logprobs:score", (self._r, self.splits), {"logits": self.raw, "meta": self.meta, "sampled": self.sampled, **parts},
            {**shape, "SPAN": self.span, "SPAN2": 1 << (self.span - 1).bit_length()}, num_warps=8,
        )  # fmt: skip
        results = {
            name: (Pointer("table", name), "i32" if name in ("rank", "top_ids") else "fp32")
            for name in ("logprob", "rank", "top_ids", "top_logprobs")
        }
        self._launch(
            "logprobs:report", (self._r,), {"logits": self.raw, "meta": self.meta, "sampled": self.sampled, **parts, **results},
            shape,
        )  # fmt: skip

    @property
    def _r(self) -> Extent:
        return Extent("R")

    def _memory(self, name: str, dtype: str, per_row: int) -> Typed:
        item = {"i64": 8, "fp64": 8, "fp32": 4, "i32": 4}[dtype]
        size = -(-self.rows * per_row * item // 256) * 256
        self.out.memory[name] = Memory(name, size, 0, 1 << 20)
        return Pointer("arena", name), dtype

    def _counters(self) -> Typed:
        self.out.counters = self.rows
        return Pointer("counters"), "i32"

    def _launch(
        self, template: str, grid: Sequence[int | Extent], args: Mapping[str, Typed], constexprs: Mapping[str, ConstValue],
        num_warps: int = 4,
    ) -> None:  # fmt: skip
        constants = {**constexprs, "PDL": self.pdl}
        if "V" in argument_names(template):
            constants["V"] = self.vocab
        # A launch of the full variant may begin at any row.
        free = {"sampled", "results", "logprob", "rank", "masks"} if self.variant == FULL else set()
        if self.variant == FULL and self.vocab % 4 and args.get("logits") == self.raw:
            free.add("logits")
        source = KernelSource.of(
            template, {n: "*" + t for n, (_, t) in args.items()}, constants, num_warps=num_warps, pdl=self.pdl,
            unaligned=tuple(sorted(free & set(args))),
        )  # fmt: skip
        config = tuple(sorted((k, str(v)) for k, v in constants.items()))
        spec = KernelSpec("sample", (), (), self.target.name, template, config, "unknown")
        x, y, z = (*grid, 1, 1)[:3]
        self.out.calls.append(
            Call(
                source, "", tuple(t for _, t in source.signature), (), (x, y, z),
                tuple(args[n][0] for n, _ in source.signature), len(self.out.calls),
                f"sampling ({self.variant}, {self.rows} rows)", spec,
            )
        )  # fmt: skip
