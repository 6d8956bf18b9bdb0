"""Cases of matrix products: linears by every path with every epilogue, and experts."""

from typing import Any, Literal

from compilerllm.validation.kernel_case import ACTS, CPU, CUDA, KernelCase, module

TILE = {"path": "matmul", "group": 8, "ahead": 0, "swap": False, "split": 1, "warps": 4, "stages": 3}
FEW = {"path": "skinny", "swap": True, "stages": 1}
# A candidate of each path that linears have, with tiles small enough for tails: (candidate, most rows).
PATHS: dict[str, tuple[dict[str, Any], int]] = {
    "gemv": ({"path": "gemv", "bn": 16, "bk": 16, "pre": 2, "warps": 4}, 3),
    "gemv, nothing early": ({"path": "gemv", "bn": 16, "bk": 64, "pre": 0, "warps": 4}, 4),
    "gemv_rows": ({"path": "gemv_rows", "bn": 16, "steps": 2, "warps": 4}, 1),
    "matmul": (TILE | {"bm": 16, "bn": 32, "bk": 32}, 19),
    "swapped": (TILE | {"bm": 16, "bn": 64, "bk": 16, "swap": True}, 5),
    "norm": (TILE | {"bm": 16, "bn": 32, "bk": 16, "norm": "inside"}, 5),
    "norm, swapped": (TILE | {"bm": 16, "bn": 64, "bk": 32, "swap": True, "norm": "inside"}, 5),
    "split": (TILE | {"bm": 16, "bn": 32, "bk": 16, "split": 4}, 19),
    "split, swapped": (TILE | {"bm": 16, "bn": 32, "bk": 32, "split": 2, "swap": True, "group": 1}, 5),
    "skinny": (FEW | {"bm": 16, "bn": 8, "bk": 64, "pre": 1, "swap": False, "warps": 4}, 13),
    "skinny, swapped": (FEW | {"bm": 8, "bn": 16, "bk": 32, "pre": 1, "warps": 2}, 7),
    "skinny, one row": (FEW | {"bm": 1, "bn": 16, "bk": 32, "pre": 2, "warps": 2}, 1),
    "skinny, loop": (FEW | {"bm": 32, "bn": 16, "bk": 16, "pre": 1, "warps": 1, "stages": 3}, 19),
    "cublas": ({"path": "cublas"}, 5),
}  # fmt: skip
NORMS_ITSELF = ("gemv", "gemv_rows", "skinny")


def linears() -> list[KernelCase]:
    """Cases of the family."""
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
        late: Literal["", "rounded", "exact"] = ""
        if candidate["path"] == "skinny" or candidate.get("norm") == "inside":
            late = "exact" if candidate["bm"] == 1 else "rounded"
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
                        late=late,
                    )
                )
    short = module("%x: $[T, 16]", "%a = linear(%x, %w) : $[T, 70]", "%a", "param %w : $[70, 16]")
    made += [
        KernelCase("linear", f"a short row, {n}", short, 3, pick=PATHS[n][0] | {"bk": 32}, targets=(CUDA,))
        for n in ("gemv", "matmul", "skinny")
    ]
    gpt = '%a = linear_gated(%x, %w, %bias, act="gpt_oss") : $[T, 35]\n%b = gated_act_packed(%x, act="silu") : $[T, 20]'
    text = module("%x: $[T, 40]", gpt, "%a, %b", declared)
    made += [
        KernelCase("linear", f"gpt_oss, {name}", text, 3, pick=PATHS[name][0], targets=(CUDA,))
        for name in ("gemv", "matmul")
    ]
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


GROUPED = {"path": "grouped", "gu_bn": 16, "gu_bk": 16, "down_bn": 16, "down_bk": 16}
GEMV = {"path": "gemv", "gu_bn": 16, "gu_bk": 16, "down_bn": 16, "down_bk": 16}


def expert_text(
    tokens: str, experts: int, top: int, hidden: int, width: int, attrs: str, bias: bool, dtype: str
) -> str:
    biases = f"param %gb : $[{experts}, {2 * width}]\nparam %db : $[{experts}, {hidden}]" if bias else ""
    decls = f"param %gu : $[{experts}, {2 * width}, {hidden}]\nparam %dn : $[{experts}, {hidden}, {width}]\n{biases}"
    body = f"%y = experts(%x, %i, %w, %gu, %dn{', %gb, %db' if bias else ''}, {attrs}) : $[T, {hidden}]"
    return module(f"%x: $[T, {hidden}], %i: i64[T, {top}], %w: $[T, {top}]", body, "%y", decls, dtype)


def experts() -> list[KernelCase]:
    """Cases of the family."""
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
