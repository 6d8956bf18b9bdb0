"""What kernels are tried on: small modules of few nodes for every family, with sizes that leave tails everywhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

Choice = Mapping[str, Any]
Lengths = tuple[tuple[int, int], ...]
CUDA, CPU = "cuda", "cpu"


@dataclass(frozen=True, eq=False)
class KernelCase:
    """A module and how to run it.

    tokens: rows of a module without a step. steps: (context before, tokens now) of each sequence, step after step, of one
    with a step. pads: rows, and sequences, that a bucket has beyond them. pick: what the emitters' candidate must have (a
    value that none of them has is forced). limits: constants of emitter modules while the program is made, as
    "module.NAME". below: whole numbers of an input lie below this. samples: "all" rows or "ends" of sequences.
    """

    family: str
    name: str
    text: str
    tokens: int = 1
    steps: tuple[Lengths, ...] = ()
    pads: int = 0
    pick: Choice = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    below: int = 4
    targets: tuple[str, ...] = (CUDA, CPU)
    samples: str = "all"
    loose: float = (
        1.0  # factor on the tolerance, where a kernel scales after a product what the reference scales before
    )
    cutlass: bool = False

    @property
    def title(self) -> str:
        return f"{self.family}/{self.name}"


def module(
    inputs: str, body: str, results: str, declared: str = "", dtype: str = "f32", more: str = ""
) -> str:
    """A function main; ``$`` stands for the dtype."""
    lines = [line.strip() for line in (declared + "\n" + body).splitlines() if line.strip()]
    dims = (
        "  dim T in [0, 4096]\n  dim S in [1, 4096]\n  dim R in [0, 4096]\n"
        if "%step" in inputs
        else "  dim T in [1, 64]\n"
    )
    text = (
        f"func @main({inputs}) {{\n{dims}"
        + "".join(f"  {x}\n" for x in lines)
        + f"  return {results}\n}}\n{more}"
    )
    return text.replace("$", dtype)


def _norms() -> list[KernelCase]:
    body = """%x = slice(%q, axis=1, start=0, stop=40) : $[T, 40]
        %r = slice(%q, axis=1, start=48, stop=88) : $[T, 40]
        %a = rms_norm(%x, %w, eps=1e-05, round_first=true) : $[T, 40]
        %c = rms_norm(%x, eps=0.001) : $[T, 40]
        %d = rms_norm(%x, %w, eps=1e-05, offset=1.0) : $[T, 40]
        %e, %f = add_rms_norm(%x, %r, %w, eps=1e-05, offset=1.0, round_first=true) : $[T, 40], $[T, 40]
        %g = layer_norm(%x, %w, %b, eps=1e-05) : $[T, 40]
        %h = layer_norm(%x, none, %b, eps=1e-05) : $[T, 40]
        %i, %j = add_layer_norm(%x, %r, %w, %b, eps=1e-05) : $[T, 40], $[T, 40]"""
    declared = "param %w : $[40]\nparam %b : $[40]"
    results = "%a, %c, %d, %e, %f, %g, %h, %i, %j"
    wide = {"emit_rows.WIDEST_ROW": 16, "emit_rows.WIDE_BLOCK": 32}
    made = []
    for dtype in ("f32", "bf16"):
        text = module("%q: $[T, 96]", body, results, declared, dtype)
        made += [
            KernelCase("norm", f"rows {dtype}", text, 5),
            KernelCase("norm", f"one row {dtype}", text, 1),
            KernelCase("norm", f"wide rows {dtype}", text, 3, limits=wide, targets=(CUDA,)),
        ]
    head = """%ids = step_field(%step, field="token_ids") : i32[T]
        %rows = step_field(%step, field="sample_rows") : i32[R]
        %x = embedding(%ids, %table) : $[T, 24]
        %zero = full(shape=[T, 24], value=0.0, dtype="$") : $[T, 24]
        %n, %s = add_rms_norm(%x, %zero, %w, eps=1e-05, round_first=true) : $[T, 24], $[T, 24]
        %a = gather_rows(%n, %rows) : $[R, 24]
        %b = gather_rows(%s, %rows) : $[R, 24]
        %m, %t = add_rms_norm(%a, %b, %w, eps=1e-05) : $[R, 24], $[R, 24]"""
    tail = "param %table : $[30, 24]\nparam %w : $[24]"
    text = module("%step: step", head, "%m", tail)
    for limits in ({}, {"emit_rows.WIDEST_ROW": 16, "emit_rows.WIDE_BLOCK": 16}):
        name = "gathered rows" + (", wide" if limits else "")
        targets = (CUDA,) if limits else (CUDA, CPU)
        made.append(
            KernelCase(
                "norm",
                name,
                text,
                steps=(((0, 5), (0, 3)),),
                pads=2,
                samples="ends",
                limits=limits,
                targets=targets,
            )
        )
    return made


def _embeddings() -> list[KernelCase]:
    made = []
    for dtype in ("f32", "bf16"):
        body = """%ids = step_field(%step, field="token_ids") : i32[T]
            %rows = step_field(%step, field="sample_rows") : i32[R]
            %x = embedding(%ids, %table) : $[T, 40]
            %y = mul(%x, scalar=6.5) : $[T, 40]
            %z = embedding(%ids, %other) : $[T, 24]
            %a = gather_rows(%y, %rows) : $[R, 40]
            %b = gather_rows(%z, %rows) : $[R, 24]"""
        declared = "param %table : $[30, 40]\nparam %other : $[30, 24]"
        text = module("%step: step", body, "%a, %b", declared, dtype)
        made.append(
            KernelCase("embed", f"a step {dtype}", text, steps=(((0, 5), (0, 3)),), pads=1, samples="ends")
        )
        plain = module(
            "%i: i32[T], %x: $[T, 24], %r: i32[T]",
            "%y = embedding(%i, %table) : $[T, 40]\n%g = gather_rows(%x, %r) : $[T, 24]",
            "%y, %g",
            "param %table : $[30, 40]",
            dtype,
        )
        made.append(KernelCase("embed", f"tensors {dtype}", plain, 7, below=7))
    packed = "%y = embedding(%i, %t) : bf16[T, 64]\n%z = embedding(%i, %u) : bf16[T, 64]\n%v = embedding(%i, %w) : bf16[T, 64]\n"
    packed += "%a = linear(%y, %t) : bf16[T, 20]\n%b = linear(%y, %u) : bf16[T, 20]\n%c = linear(%y, %w) : bf16[T, 20]"
    declared = "param %t : q4_1[20, 64]\nparam %u : q4_0[20, 64]\nparam %w : q8_0[20, 64]"
    for tokens in (1, 6):
        made.append(
            KernelCase(
                "embed",
                f"packed tables, {tokens}",
                module("%i: i32[T]", packed, "%y, %z, %v, %a, %b, %c", declared),
                tokens,
                below=20,
                targets=(CPU,),
            )
        )
    tied = module(
        "%i: i32[T]",
        "%y = embedding(%i, %t) : $[T, 48]\n%a = linear(%y, %t) : $[T, 20]",
        "%y, %a",
        "param %t : $[20, 48]",
    )
    made += [
        KernelCase("embed", f"tied {d}", tied.replace("f32", d), 4, below=20, targets=(CPU,))
        for d in ("f32", "bf16")
    ]
    return made


TILE = {"path": "matmul", "group": 8, "ahead": 0, "swap": False, "split": 1, "warps": 4, "stages": 3}
FEW = {"path": "skinny", "swap": True, "stages": 1}
# A candidate of each path that linears have, with tiles small enough for tails: (candidate, most rows).
PATHS: dict[str, tuple[dict[str, Any], int]] = {
    "gemv": ({"path": "gemv", "bn": 4, "bk": 16, "pre": 2, "warps": 4}, 3),
    "gemv, nothing early": ({"path": "gemv", "bn": 2, "bk": 64, "pre": 0, "warps": 4}, 4),
    "gemv_rows": ({"path": "gemv_rows", "bn": 4, "steps": 2, "warps": 4}, 1),
    "matmul": (TILE | {"bm": 16, "bn": 32, "bk": 32}, 19),
    "swapped": (TILE | {"bm": 16, "bn": 64, "bk": 16, "swap": True}, 5),
    "norm": (TILE | {"bm": 16, "bn": 32, "bk": 16, "norm": "inside"}, 5),
    "norm, swapped": (TILE | {"bm": 16, "bn": 64, "bk": 32, "swap": True, "norm": "inside"}, 5),
    "split": (TILE | {"bm": 16, "bn": 32, "bk": 16, "split": 4}, 19),
    "split, swapped": (TILE | {"bm": 16, "bn": 32, "bk": 32, "split": 2, "swap": True, "group": 1}, 5),
    "skinny": (FEW | {"bm": 16, "bn": 8, "bk": 64, "pre": 1, "swap": False, "warps": 4}, 13),
    "skinny, swapped": (FEW | {"bm": 8, "bn": 16, "bk": 32, "pre": 1, "warps": 2}, 7),
    "skinny, one row": (FEW | {"bm": 1, "bn": 4, "bk": 32, "pre": 2, "warps": 2}, 1),
    "skinny, loop": (FEW | {"bm": 32, "bn": 16, "bk": 16, "pre": 1, "warps": 1, "stages": 3}, 19),
    "cublas": ({"path": "cublas"}, 5),
}  # fmt: skip
NORMS_ITSELF = ("gemv", "gemv_rows", "skinny")


def _linears() -> list[KernelCase]:
    plain = """%x = slice(%q, axis=1, start=0, stop=40) : $[T, 40]
        %a = linear(%x, %w) : $[T, 70]
        %b = linear(%x, %w, %bias, out_dtype="f32") : f32[T, 70]
        %c = linear_act(%x, %w, %bias, act="gelu_tanh") : $[T, 70]
        %d = linear_add(%x, %w, %r, %bias) : $[T, 70]
        %e = linear_gated(%x, %w, act="silu") : $[T, 35]
        %f = linear_gated(%x, %w, %bias, act="gelu") : $[T, 35]"""
    normed = """%g, %s = norm_linear(%x, %t, %n, %w, %bias, eps=1e-5, round_first=true) : $[T, 70], $[T, 40]
        %h, %u = norm_linear(%x, %t, %n, %w, eps=1e-3, offset=1.0, out_dtype="f32") : f32[T, 70], $[T, 40]
        %i, %v = norm_linear_gated(%x, %t, %n, %w, eps=1e-5, act="silu") : $[T, 35], $[T, 40]"""
    declared = "param %w : $[70, 40]\nparam %bias : $[70]"
    made = []
    for name, (candidate, most) in PATHS.items():
        itself = candidate["path"] in NORMS_ITSELF or candidate.get("norm") == "inside"
        late = candidate["path"] == "skinny" or candidate.get("norm") == "inside"
        for dtype in ("f32", "bf16"):
            text = module("%q: $[T, 48], %r: $[T, 70]", plain, "%a, %b, %c, %d, %e, %f", declared, dtype)
            if candidate.get("norm") is None:
                made.append(
                    KernelCase("linear", f"{name} {dtype}", text, most, pick=candidate, targets=(CUDA,))
                )
            other = candidate if itself else candidate | {"norm": "apart"}
            if itself or (name == "matmul" and dtype == "bf16"):
                text = module(
                    "%q: $[T, 48], %t: $[T, 40]",
                    plain.splitlines()[0] + "\n" + normed,
                    "%g, %s, %h, %u, %i, %v",
                    declared + "\nparam %n : $[40]",
                    dtype,
                )
                made.append(
                    KernelCase(
                        "linear",
                        f"norm, {name} {dtype}",
                        text,
                        most,
                        pick=other,
                        targets=(CUDA,),
                        loose=100.0 if late and dtype == "bf16" else 1.0,
                    )
                )
    gpt = '%a = linear_gated(%x, %w, %bias, act="gpt_oss") : $[T, 35]\n%b = gated_act_packed(%x, act="silu") : $[T, 20]'
    for name in ("gemv", "matmul"):
        made.append(
            KernelCase(
                "linear",
                f"gpt_oss, {name}",
                module("%x: $[T, 40]", gpt, "%a, %b", declared),
                3,
                pick=PATHS[name][0],
                targets=(CUDA,),
            )
        )
    acts = "\n".join(f'%a{i} = linear_act(%x, %w, act="{act}") : $[T, 70]' for i, act in enumerate(ACTS))
    acts += "\n" + "\n".join(
        f'%b{i} = gated_act_packed(%x, act="{act}") : $[T, 20]' for i, act in enumerate(ACTS)
    )
    names = ", ".join(f"%{p}{i}" for p in "ab" for i in range(len(ACTS)))
    made.append(
        KernelCase(
            "linear", "activations", module("%x: $[T, 40]", acts, names, declared), 2, pick=PATHS["matmul"][0]
        )
    )
    for width, kind in ((48, "whole panels"), (40, "a tail")):
        half = width // 2
        body = f"""%a = linear(%x, %w) : $[T, {width}]
            %b = linear(%x, %v, %c, out_dtype="f32") : f32[T, {width}]
            %d = linear_act(%x, %u, %c, act="gelu_tanh") : $[T, {width}]
            %e = linear_add(%x, %z, %r, %c) : $[T, {width}]
            %f = linear_gated(%x, %g, act="silu") : $[T, {2 * half}]
            %h = linear_gated(%x, %i, %j, act="gelu") : $[T, {2 * half}]
            %k = linear(%x, %w) : $[T, {width}]"""
        decls = "".join(f"param %{p} : $[{width}, 72]\n" for p in "wvuz") + f"param %c : $[{width}]\n"
        decls += f"param %g : $[{4 * half}, 72]\nparam %i : $[{4 * half}, 72]\nparam %j : $[{4 * half}]"
        for dtype in ("f32", "bf16"):
            text = module(
                f"%x: $[T, 72], %r: $[T, {width}]", body, "%a, %b, %d, %e, %f, %h, %k", decls, dtype
            )
            made += [
                KernelCase("linear", f"{kind} {dtype}, {t}", text, t, targets=(CPU,)) for t in (1, 5, 19)
            ]
    packed = "\n".join(f"%y{i} = linear(%x, %{t}, %b) : $[T, 37]" for i, t in enumerate("uvw"))
    decls = "param %u : q4_0[37, 64]\nparam %v : q4_1[37, 64]\nparam %w : q8_0[37, 64]\nparam %b : $[37]"
    for dtype in ("f32", "bf16"):
        text = module("%x: $[T, 64]", packed, "%y0, %y1, %y2", decls, dtype)
        made += [
            KernelCase("linear", f"packed weights {dtype}, {t}", text, t, targets=(CPU,)) for t in (1, 7)
        ]
    return made


ACTS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "identity")


def _rotations() -> list[KernelCase]:
    tables = """%c, %s = rotary_table(%p, %f, layout="half", dtype="$", scaling=1.25) : $[T, 16], $[T, 16]
        %d, %t = rotary_table(%p, %f, layout="repeat", dtype="$") : $[T, 16], $[T, 16]
        %e, %u = rotary_table(%p, %f, layout="half_width", dtype="$") : $[T, 8], $[T, 8]"""
    ropes = """%a = rope(%x, %c, %s, style="half", head_axis=-2) : $[T, 3, 24]
        %b = rope(%x, %d, %t, style="interleaved", head_axis=-2) : $[T, 3, 24]
        %g = rope(%x, %e, %u, style="half", head_axis=-2, half_width=true, f32=true) : $[T, 3, 24]
        %h = rope(%x, %e, %u, style="interleaved", head_axis=-2, half_width=true) : $[T, 3, 24]"""
    made = []
    for dtype in ("f32", "bf16"):
        for tokens in (1, 9):
            inputs = "%p: i32[T], %f: f32[8], %x: $[T, 3, 24]"
            made.append(
                KernelCase(
                    "rope",
                    f"tables {dtype}, {tokens}",
                    module(inputs, tables, "%c, %s, %d, %t, %e, %u", "", dtype),
                    tokens,
                    below=900,
                )
            )
            text = module(inputs, tables + "\n" + ropes, "%a, %b, %g, %h", "", dtype)
            made.append(
                KernelCase("rope", f"turns {dtype}, {tokens}", text, tokens, below=900, targets=(CUDA,))
            )
            halves = module(inputs, tables.splitlines()[0] + "\n" + ropes.splitlines()[0], "%a", "", dtype)
            repeats = module(inputs, tables.splitlines()[1] + "\n" + ropes.splitlines()[1], "%b", "", dtype)
            made += [
                KernelCase("rope", f"{n} {dtype}, {tokens}", t, tokens, below=900, targets=(CPU,))
                for n, t in (("half", halves), ("interleaved", repeats))
            ]
    return made


MIXED: tuple[Lengths, ...] = (((0, 33), (0, 3)), ((33, 1), (3, 36), (0, 2)))
DECODES: tuple[Lengths, ...] = (
    ((0, 33), (0, 3), (0, 1)),
    ((33, 1), (3, 1), (1, 1)),
    ((34, 1), (4, 1), (2, 1)),
)
LONG: tuple[Lengths, ...] = (((0, 70), (0, 40)), ((70, 1), (40, 1)))


@dataclass(frozen=True)
class Attention:
    """A layer's attention: how q, k and v are made of a packed projection, and what its scores go through."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    rot: int = 16
    style: str = "half"
    half_width: bool = False
    f32: bool = False
    norm: str = ""  # attributes of the norm of q and k
    norms: str = "%qn, %kn"
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    apart: bool = False  # rope and kv_write as nodes of their own

    def text(self, dtype: str) -> str:
        h, k, d = self.heads, self.kv_heads, self.dim
        total = (h + 2 * k) * d
        layout = "half_width" if self.half_width else ("half" if self.style == "half" else "repeat")
        width = self.rot // 2 if self.half_width else self.rot
        extra = (", half_width=true" if self.half_width else "") + (", f32=true" if self.f32 else "")
        window = f", window={self.window}" if self.window else ""
        declared = f"param %table : $[40, {total}]\nparam %freq : f32[{max(1, self.rot // 2)}]\nparam %qn : $[{d}]\nparam %kn : $[{d}]\nparam %sinks : $[{h}]\nstate %kv : paged_kv<$, heads={k}, dim={d}{window}>"
        body = f"""%ids = step_field(%step, field="token_ids") : i32[T]
            %positions = step_field(%step, field="positions") : i32[T]
            %rows = step_field(%step, field="sample_rows") : i32[R]
            %x = embedding(%ids, %table) : $[T, {total}]"""
        turns = "none, none"
        if self.rot:
            body += f'\n%cos, %sin = rotary_table(%positions, %freq, layout="{layout}", dtype="$") : $[T, {width}], $[T, {width}]'
            turns = "%cos, %sin"
        if self.apart:
            body += f"""
            %heads = reshape(%x, shape=[T, {h + 2 * k}, {d}]) : $[T, {h + 2 * k}, {d}]
            %q0 = slice(%heads, axis=1, start=0, stop={h}) : $[T, {h}, {d}]
            %k0 = slice(%heads, axis=1, start={h}, stop={h + k}) : $[T, {k}, {d}]
            %v = slice(%heads, axis=1, start={h + k}, stop={h + 2 * k}) : $[T, {k}, {d}]
            %q = rope(%q0, %cos, %sin, style="{self.style}", head_axis=-2{extra}) : $[T, {h}, {d}]
            %k = rope(%k0, %cos, %sin, style="{self.style}", head_axis=-2{extra}) : $[T, {k}, {d}]
            kv_write(%kv, %k, %v, %step)"""
        else:
            norms = self.norms if self.norm else ""
            operands = ", ".join(x for x in (turns if self.rot or norms else "", norms) if x)
            style = f', style="{self.style}"{extra}' if self.rot else ""
            norm = f", {self.norm}" if self.norm else ""
            body += f"\n%q = qkv_rope_write(%kv, %x, %step{', ' if operands else ''}{operands}, heads={h}{style}{norm}) : $[T, {h}, {d}]"
        attrs = "scale=0.21" + window + (f", softcap={self.softcap}" if self.softcap else "")
        body += f"""
            %a = paged_attention(%q, %kv, %step{", %sinks" if self.sinks else ""}, {attrs}) : $[T, {h}, {d}]
            %flat = reshape(%a, shape=[T, {h * d}]) : $[T, {h * d}]
            %out = gather_rows(%flat, %rows) : $[R, {h * d}]"""
        return module("%step: step", body, "%out", declared, dtype)


KINDS: dict[str, Attention] = {
    "plain": Attention(),
    "one key head, softcap": Attention(heads=3, kv_heads=1, dim=24, rot=24, softcap=4.0),
    "window and sinks": Attention(window=20, sinks=True),
    "window of one": Attention(window=1, kv_heads=4),
    "norms, partial": Attention(dim=24, rot=8, norm="eps=1e-05, round_first=true"),
    "norms with offset, interleaved": Attention(style="interleaved", norm="eps=0.01, offset=1.0", sinks=True),
    "half width": Attention(half_width=True, f32=True, kv_heads=1),
    "one norm": Attention(norm="eps=1e-05", norms="none, %kn", rot=0, window=40, softcap=5.0),
    "no rotation": Attention(rot=0),
    "apart": Attention(apart=True, window=20),
}
FUSED = {"path": None}


def _attentions() -> list[KernelCase]:
    made = []
    few = {"emit_decode.MOST_SPLITS": 2}
    for name, kind in KINDS.items():
        for dtype in ("f32", "bf16") if name in ("plain", "norms, partial", "half width") else ("f32",):
            text = kind.text(dtype)
            cpu = not kind.half_width  # CPU tables have no half width beside others
            made.append(
                KernelCase(
                    "attention",
                    f"prompts, {name} {dtype}",
                    text,
                    steps=MIXED,
                    pads=3,
                    targets=(CUDA, CPU) if cpu else (CUDA,),
                    pick={"BH": 4, "BT": 2},
                )
            )
            if not kind.apart:
                made.append(
                    KernelCase(
                        "decode",
                        f"fused, {name} {dtype}",
                        text,
                        steps=DECODES,
                        pads=1,
                        limits=few,
                        pick={"splits": 2},
                        targets=(CUDA,),
                    )
                )
    plain, sinks = (
        KINDS["plain"].text("f32"),
        Attention(sinks=True, softcap=9.0, heads=6, kv_heads=2).text("f32"),
    )
    for splits, fused in ((1, 1), (2, 1), (3, 0)):
        made.append(
            KernelCase(
                "decode",
                f"apart, {splits} splits, {fused}",
                Attention(sinks=True, heads=6, apart=True).text("f32"),
                steps=LONG,
                pads=1,
                pick={"splits": splits, "fused": fused, "least": 1, "BN": 32},
                targets=(CUDA,),
            )
        )
    made.append(
        KernelCase(
            "decode",
            "apart, windows",
            Attention(window=40, apart=True).text("f32"),
            steps=LONG,
            pick={"splits": 2, "fused": 0, "least": 2, "BN": 16},
            targets=(CUDA,),
        )
    )
    made.append(
        KernelCase(
            "decode",
            "wide tiles",
            plain,
            steps=LONG,
            limits=few,
            pick={"splits": 2, "BN": 128, "dot": 0},
            targets=(CUDA,),
        )
    )
    made.append(
        KernelCase(
            "decode",
            "three splits",
            sinks,
            steps=LONG,
            limits={"emit_decode.MOST_SPLITS": 4},
            pick={"splits": 3, "BN": 32, "least": 1},
            targets=(CUDA,),
        )
    )
    made.append(
        KernelCase(
            "decode",
            "one sequence",
            plain,
            steps=(((0, 40),), ((40, 1),)),
            limits=few,
            pick={"splits": 2, "BN": 16},
            targets=(CUDA,),
        )
    )
    made.append(
        KernelCase(
            "attention",
            "wide tiles of prompts",
            KINDS["window and sinks"].text("f32"),
            steps=(((0, 150), (0, 7)), ((150, 5), (7, 3))),
            pick={"BM": 32, "BN": 128},
        )
    )
    made.append(
        KernelCase(
            "attention",
            "narrow tiles of prompts",
            plain,
            steps=MIXED,
            pads=2,
            pick={"BM": 16, "BN": 16},
            targets=(CUDA,),
        )
    )
    made.append(
        KernelCase(
            "attention",
            "a long context",
            plain,
            steps=(((0, 300),), ((300, 1),), ((301, 9),)),
            targets=(CPU,),
        )
    )
    for attrs in (
        "causal=true",
        "causal=false",
        "causal=true, window=7, softcap=6.0",
        "causal=false, window=9",
    ):
        body = f"%a = attention(%q, %k, %v{', %s' if 'softcap' in attrs else ''}, scale=0.25, {attrs}) : $[T, 4, 24]"
        text = module("%q: $[T, 4, 24], %k: $[T, 2, 24], %v: $[T, 2, 24]", body, "%a", "param %s : $[4]")
        made += [
            KernelCase("attention", f"dense, {attrs}, {t}", text, t, pick={"BM": 32, "BN": 16})
            for t in (1, 37)
        ]
        made.append(
            KernelCase(
                "attention",
                f"dense bf16, {attrs}",
                text.replace("f32", "bf16"),
                37,
                pick={"BM": 32, "BN": 32},
            )
        )
    return made


GROUPED = {"path": "grouped", "gu_bn": 16, "gu_bk": 16, "down_bn": 16, "down_bk": 16}
GEMV = {"path": "gemv", "gu_bn": 8, "gu_bk": 16, "down_bn": 8, "down_bk": 16}


def expert_text(
    tokens: str, experts: int, top: int, hidden: int, width: int, attrs: str, bias: bool, dtype: str
) -> str:
    biases = f"param %gb : $[{experts}, {2 * width}]\nparam %db : $[{experts}, {hidden}]" if bias else ""
    decls = f"param %gu : $[{experts}, {2 * width}, {hidden}]\nparam %dn : $[{experts}, {hidden}, {width}]\n{biases}"
    body = f"%y = experts(%x, %i, %w, %gu, %dn{', %gb, %db' if bias else ''}, {attrs}) : $[T, {hidden}]"
    return module(f"%x: $[T, {hidden}], %i: i64[T, {top}], %w: $[T, {top}]", body, "%y", decls, dtype)


def _experts() -> list[KernelCase]:
    gpt = 'act="gpt_oss", interleaved=true, limit=1.5, alpha=1.702'
    shapes: dict[str, tuple[int, int, int, int, str, bool, int]] = {
        "tails": (5, 2, 24, 20, 'act="silu"', False, 6),
        "one token": (5, 3, 32, 16, 'act="silu"', False, 1),
        "blocks": (3, 2, 24, 20, 'act="gelu_tanh"', True, 19),
        "gpt_oss": (5, 2, 24, 20, gpt, True, 6),
        "many": (7, 3, 16, 16, 'act="relu"', True, 45),
    }
    made = []
    for name, (experts, top, hidden, width, attrs, bias, tokens) in shapes.items():
        for dtype in ("f32", "bf16") if name in ("tails", "gpt_oss") else ("f32",):
            text = expert_text("T", experts, top, hidden, width, attrs, bias, dtype)
            for path in (GEMV, GROUPED | {"bm": 16}):
                if path is GEMV and name == "many":
                    path = GROUPED | {"bm": 32}
                made.append(
                    KernelCase(
                        "experts",
                        f"{name} {dtype}, {path['path']} {path.get('bm', '')}".strip(),
                        text,
                        tokens,
                        below=experts,
                        pick=path,
                        targets=(CUDA,),
                    )
                )
            text = expert_text("T", experts, top, hidden + 8, 32, attrs, bias, dtype)
            made.append(
                KernelCase("experts", f"{name} {dtype}, panels", text, tokens, below=experts, targets=(CPU,))
            )
    chunks = {"emit_experts.ALIGNED_AT_ONCE": 0, "emit_experts.CHUNK": 32}
    many = expert_text("T", 6, 3, 16, 16, 'act="silu"', False, "f32")
    made.append(
        KernelCase(
            "experts",
            "placed by chunks",
            many,
            45,
            below=6,
            pick=GROUPED | {"bm": 16},
            limits=chunks,
            targets=(CUDA,),
        )
    )
    for at_once in (4096, 4):
        text = expert_text("T", 5, 2, 24, 24, 'act="silu"', False, "bf16")
        limits = {"emit_experts.ALIGNED_AT_ONCE": at_once, "emit_experts.ROWS_OF_AN_EXPERT": 0}
        made.append(
            KernelCase(
                "experts",
                f"sorted rows, {at_once} at once",
                text,
                9,
                below=5,
                pick={"path": "cutlass"},
                limits=limits,
                targets=(CUDA,),
                cutlass=True,
            )
        )
    text = routed_text()
    made += [
        KernelCase(
            "experts",
            f"a padded step, {p['path']}",
            text,
            steps=(((0, 4), (0, 2)),),
            pads=3,
            pick=p,
            targets=(CUDA,),
        )
        for p in (GEMV, GROUPED | {"bm": 16})
    ]
    return made


def routed_text() -> str:
    """A mixture of experts in a step: rows beyond the step's own are routed nowhere."""
    body = """%ids = step_field(%step, field="token_ids") : i32[T]
        %rows = step_field(%step, field="sample_rows") : i32[R]
        %x = embedding(%ids, %table) : $[T, 24]
        %logits = linear(%x, %gate) : $[T, 5]
        %w, %i = route(%logits, k=2, softmax="before", normalise=true, dtype="$") : $[T, 2], i64[T, 2]
        %y = experts(%x, %i, %w, %gu, %dn, act="silu") : $[T, 24]
        %out = gather_rows(%y, %rows) : $[R, 24]"""
    decls = (
        "param %table : $[30, 24]\nparam %gate : $[5, 24]\nparam %gu : $[5, 40, 24]\nparam %dn : $[5, 24, 20]"
    )
    return module("%step: step", body, "%out", decls)


def _routes() -> list[KernelCase]:
    made = []
    for dtype in ("f32", "bf16"):
        for k, n in ((3, 12), (5, 5)):
            body = f"""%a, %b = route(%x, k={k}, softmax="before", normalise=true, dtype="$") : $[T, {k}], i64[T, {k}]
                %c, %d = route(%x, k={k}, softmax="after", dtype="$") : $[T, {k}], i64[T, {k}]
                %e, %f = route(%x, k={k}, softmax="before", dtype="f32") : f32[T, {k}], i64[T, {k}]
                %g, %h = topk(%x, k={k}) : $[T, {k}], i64[T, {k}]"""
            text = module(f"%x: $[T, {n}]", body, "%a, %b, %c, %d, %e, %f, %g, %h", "", dtype)
            made.append(KernelCase("route", f"{k} of {n} {dtype}", text, 5, targets=(CUDA,)))
            top = module(f"%x: $[T, {n}]", body.splitlines()[-1], "%g, %h", "", dtype)
            made.append(KernelCase("route", f"largest {k} of {n} {dtype}", top, 5, targets=(CPU,)))
        for bias, attrs in (
            ("", 'eps=1e-06, round_first=true, softmax="before", normalise=true'),
            (", %b", 'eps=0.01, offset=1.0, softmax="after"'),
        ):
            body = f'%y, %s, %w, %i = norm_route(%x, %r, %n, %g{bias}, {attrs}, k=3, dtype="$") : $[T, 40], $[T, 40], $[T, 3], i64[T, 3]'
            text = module(
                "%x: $[T, 40], %r: $[T, 40]",
                body,
                "%y, %s, %w, %i",
                "param %n : $[40]\nparam %g : $[7, 40]\nparam %b : $[7]",
                dtype,
            )
            made.append(
                KernelCase("route", f"norm{' and bias' if bias else ''} {dtype}", text, 3, targets=(CUDA,))
            )
    return made


def _groups() -> list[KernelCase]:
    unary = (
        "neg",
        "abs",
        "exp",
        "tanh",
        "sigmoid",
        "silu",
        "relu",
        "gelu",
        "gelu_tanh",
        "sin",
        "cos",
        "erf",
        "floor",
        "square",
    )
    body = "\n".join(f"%u{i} = {op}(%x) : $[T, 21]" for i, op in enumerate(unary))
    body += "\n%p = abs(%x) : $[T, 21]\n" + "\n".join(
        f"%v{i} = {op}(%p) : $[T, 21]" for i, op in enumerate(("log1p", "sqrt"))
    )
    binary = ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "remainder", "floor_div")
    body += "\n" + "\n".join(
        f"%b{i} = {op}(%{'p' if op == 'pow' else 'x'}, %y) : $[T, 21]" for i, op in enumerate(binary)
    )
    results = [f"%u{i}" for i in range(len(unary))] + ["%v0", "%v1"] + [f"%b{i}" for i in range(len(binary))]
    made = [
        KernelCase(
            "groups",
            f"pointwise {d}",
            module("%x: $[T, 21], %y: $[T, 21]", body, ", ".join(results), "", d),
            5,
        )
        for d in ("f32",)
    ]
    rows = "\n".join(
        f"%r{i} = {op}(%x, axis=1) : {'i64' if op == 'argmax' else '$'}[T]"
        for i, op in enumerate(("sum", "mean", "amax", "amin", "argmax", "prod"))
    )
    rows += "\n%s = softmax(%x, axis=1) : $[T, 37]"
    results = [f"%r{i}" for i in range(6)] + ["%s"]
    text = module("%x: $[T, 37]", rows, ", ".join(results))
    made.append(KernelCase("groups", "rows", text, 5))
    made.append(
        KernelCase(
            "groups",
            "rows in pieces",
            text,
            3,
            limits={"groups.WIDEST_ROW": 16, "emit_groups.WIDEST_ROW": 16},
            targets=(CUDA,),
        )
    )
    whole = "%a = remainder(%x, %y) : i32[T]\n%b = floor_div(%x, %y) : i32[T]\n%c = sub(%x, scalar=3) : i32[T]\n%d = remainder(%c, scalar=2) : i32[T]\n%e = floor_div(%c, scalar=2) : i32[T]\n%f = remainder(%c, scalar=-2) : i32[T]\n%g = floor_div(%c, scalar=-2) : i32[T]"
    made.append(
        KernelCase(
            "groups",
            "whole numbers",
            module("%x: i32[T]", whole.split("\n", 2)[2], "%d, %e, %f, %g"),
            9,
            below=8,
        )
    )
    power = "%a = pow(%x, scalar=3.0) : $[T, 8]\n%b = pow(%x, scalar=2.0) : $[T, 8]\n%c = pow(%x, %y) : $[T, 8]\n%d = floor(%y) : $[T, 8]\n%e = pow(%x, %d) : $[T, 8]\n%z = mul(%x, scalar=0.0) : $[T, 8]\n%f = pow(%x, %z) : $[T, 8]\n%k = log1p(%z) : $[T, 8]\n%i = div(%x, %z) : $[T, 8]\n%j = abs(%i) : $[T, 8]\n%g = log1p(%j) : $[T, 8]\n%m = maximum(%i, %y) : $[T, 8]\n%o = mul(%z, %i) : $[T, 8]\n%h = maximum(%o, %y) : $[T, 8]\n%n = minimum(%y, %o) : $[T, 8]\n%l = relu(%o) : $[T, 8]\n%q = tanh(%i) : $[T, 8]\n%s = sigmoid(%i) : $[T, 8]\n%t = minimum(%o, %y) : $[T, 8]\n%u = maximum(%y, %o) : $[T, 8]"
    names = "%a, %b, %c, %e, %f, %k, %g, %m, %h, %n, %l, %q, %s, %t, %u"
    made.append(KernelCase("groups", "special values", module("%x: $[T, 8], %y: $[T, 8]", power, names), 4))
    moves = "%p = permute(%x, order=[1, 0, 2]) : $[4, T, 8]\n%s = slice(%p, axis=2, start=1, stop=8, step=2) : $[4, T, 4]\n%e = reshape(%r, shape=[4, 1, 1]) : $[4, 1, 1]\n%y = mul(%s, %e) : $[4, T, 4]\n%c = concat(%y, %s, axis=2) : $[4, T, 8]\n%d = reshape(%c, shape=[4, 8*T]) : $[4, 8*T]"
    made += [
        KernelCase("groups", f"moves {d}", module("%x: $[T, 4, 8], %r: $[4, 1]", moves, "%y, %d", "", d), 5)
        for d in ("f32", "bf16")
    ]
    joined = module("%x: $[T, 96], %w: $[96]", "%y = group(%x, %w, fn=@fused) : $[T, 96]", "%y", "", "bf16")
    inner = "func @fused(%a: bf16[T, 96], %b: bf16[96]) {\n  dim T in [1, 64]\n  %v = mul(%a, scalar=0.5) : bf16[T, 96]\n  %u = add(%v, %b) : bf16[T, 96]\n  %m = mul(%u, %u) : bf16[T, 96]\n  %c = sub(%m, %a) : bf16[T, 96]\n  return %c\n}\n"
    made.append(KernelCase("groups", "roundings in between", joined + inner, 5))
    gated = "\n".join(f'%y{i} = gated_act(%g, %u, act="{a}") : $[T, 37]' for i, a in enumerate(ACTS))
    gated += '\n%c = softcap(%g, cap=3.0) : $[T, 37]\n%w = gated_act_packed(%k, act="silu") : $[T, 18]'
    results = [f"%y{i}" for i in range(len(ACTS))] + ["%c", "%w"]
    made += [
        KernelCase(
            "groups",
            f"gates {d}",
            module("%g: $[T, 37], %u: $[T, 37], %k: $[T, 36]", gated, ", ".join(results), "", d),
            3,
        )
        for d in ("f32", "bf16")
    ]
    return made


@cache
def cases() -> tuple[KernelCase, ...]:
    """All of them, by family."""
    made: Sequence[KernelCase] = (
        *_norms(), *_embeddings(), *_linears(), *_rotations(), *_attentions(), *_experts(), *_routes(), *_groups(),
    )  # fmt: skip
    return tuple(made)
