"""Cases of attention: prompts, decoding in splits, windows, soft caps, sinks, norms and rotations of queries and keys."""

from dataclasses import dataclass
from typing import Any

from compilerllm.validation.kernel_case import CPU, CUDA, KernelCase, Lengths, module

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
ON_CPU = (
    "plain",
    "one key head, softcap",
    "window and sinks",
    "norms, partial",
    "norms with offset, interleaved",
    "apart",
)


def attentions() -> list[KernelCase]:
    """Cases of the family."""
    few = {"emit_decode.MOST_SPLITS": 2}
    made: list[KernelCase] = []

    def add(family: str, name: str, text: str, **options: Any) -> None:
        made.append(
            KernelCase(family, name, text, unlike=0.5, **options)
        )  # parts are rounded before they are scaled

    for name, kind in KINDS.items():
        for dtype in ("f32", "bf16") if name in ("plain", "norms, partial", "half width") else ("f32",):
            text = kind.text(dtype)
            targets = (CUDA, CPU) if name in ON_CPU else (CUDA,)
            pick = {"BH": 4, "BT": 2}
            add(
                "attention", f"prompts, {name} {dtype}", text, steps=MIXED, pads=3, targets=targets, pick=pick
            )
            if not kind.apart:
                pick, title = {"splits": 2}, f"fused, {name} {dtype}"
                add("decode", title, text, steps=DECODES, pads=1, limits=few, pick=pick, targets=(CUDA,))
    plain = KINDS["plain"].text("f32")
    sinks = Attention(sinks=True, softcap=9.0, heads=6, kv_heads=2).text("f32")
    apart = Attention(sinks=True, heads=6, apart=True).text("f32")
    for splits, fused in ((1, 1), (2, 1), (3, 0)):
        pick = {"splits": splits, "fused": fused, "least": 1, "BN": 32}
        add(
            "decode",
            f"apart, {splits} splits, {fused}",
            apart,
            steps=LONG,
            pads=1,
            pick=pick,
            targets=(CUDA,),
        )
    windows = Attention(window=40, apart=True).text("f32")
    pick = {"splits": 2, "fused": 0, "least": 2, "BN": 16}
    add("decode", "apart, windows", windows, steps=LONG, pick=pick, targets=(CUDA,))
    pick = {"splits": 2, "BN": 128, "dot": 0}
    add("decode", "wide tiles", plain, steps=LONG, limits=few, pick=pick, targets=(CUDA,))
    pick = {"splits": 3, "BN": 32, "least": 1}
    add(
        "decode",
        "three splits",
        sinks,
        steps=LONG,
        limits={"emit_decode.MOST_SPLITS": 4},
        pick=pick,
        targets=(CUDA,),
    )
    pick = {"splits": 2, "BN": 16}
    add(
        "decode",
        "one sequence",
        plain,
        steps=(((0, 40),), ((40, 1),)),
        limits=few,
        pick=pick,
        targets=(CUDA,),
    )
    # All four blocks of a tile of 128 keys, behind another tile.
    wide: tuple[Lengths, ...] = (((0, 230), (0, 7)), ((230, 5), (7, 3)))
    add(
        "attention",
        "wide tiles",
        KINDS["window and sinks"].text("f32"),
        steps=wide,
        pick={"BM": 32, "BN": 128},
    )
    add("attention", "narrow tiles", plain, steps=MIXED, pads=2, pick={"BM": 16, "BN": 16}, targets=(CUDA,))
    add("attention", "a long context", plain, steps=(((0, 300),), ((300, 1),), ((301, 9),)), targets=(CPU,))
    padless = Attention(dim=32, rot=32).text("f32")  # what is written behind a row is another's
    add("attention", "whole tiles of a head", padless, steps=(((0, 70),), ((70, 2),)), targets=(CPU,))
    ways = ("causal=true", "causal=false", "causal=true, window=7, softcap=6.0", "causal=false, window=9")
    body = "\n".join(
        f"%y{i} = attention(%q, %k, %v{', %s' if 'softcap' in way else ''}, scale=0.25, {way}) : $[T, 4, 24]"
        for i, way in enumerate(ways)
    )
    inputs = "%q: $[T, 4, 24], %k: $[T, 2, 24], %v: $[T, 2, 24]"
    for dtype in ("f32", "bf16"):
        text = module(inputs, body, "%y0, %y1, %y2, %y3", "param %s : $[4]", dtype)
        for tokens in (1, 37):
            add("attention", f"dense {dtype}, {tokens}", text, tokens=tokens, pick={"BM": 32, "BN": 16})
    return made
