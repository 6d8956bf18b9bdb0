"""One or more functions for every op, as text: they must parse, verify, print back, and run in the reference."""

from compilerllm.ir.op import all_ops

_DIMS = "dim T in [1, 64]\n  dim S in [1, 8]\n  dim R in [0, 64]"
_FLOAT_UNARY = (
    "neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "tanh", "sigmoid", "silu", "relu", "gelu", "gelu_tanh",
    "sin", "cos", "erf", "floor", "log1p", "square",
)  # fmt: skip
_ARITHMETIC = ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "remainder", "floor_div")
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")


def function(inputs: str, body: str, result: str, decls: str = "", name: str = "main") -> str:
    """A function with dims T, S and R declared."""
    lines = "\n  ".join(line.strip() for line in (decls + "\n" + body).strip().splitlines())
    return f"func @{name}({inputs}) {{\n  {_DIMS}\n  {lines}\n  return {result}\n}}\n"


def _samples() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}

    def add(op: str, inputs: str, body: str, result: str = "%y", decls: str = "", more: str = "") -> None:
        found.setdefault(op, []).append(function(inputs, body, result, decls) + more)

    for op in _FLOAT_UNARY:
        add(op, "%x: f32[T, 8]", f"%y = {op}(%x) : f32[T, 8]")
        add(op, "%x: bf16[2, T]", f"%y = {op}(%x) : bf16[2, T]")
    add("logical_not", "%x: bool[T]", "%y = logical_not(%x) : bool[T]")
    for op in (*_ARITHMETIC, *_COMPARE):
        out = "bool" if op in _COMPARE else "f32"
        add(op, "%a: f32[T, 8], %b: f32[8]", f"%y = {op}(%a, %b) : {out}[T, 8]")
        add(op, "%a: f32[T, 8]", f"%y = {op}(%a, scalar=1.5) : {out}[T, 8]")
        add(op, "%a: f32[T, 8]", f"%y = {op}(%a, scalar=2, reverse=true) : {out}[T, 8]")
        add(op, "%a: bf16[T, 1], %b: f32[1, 8]", f"%y = {op}(%a, %b) : {out}[T, 8]")
    add("sub", "%a: i64[T]", "%y = sub(%a, scalar=3) : i64[T]")
    add("mul", "%a: i32[T]", "%y = mul(%a, scalar=0.5) : f32[T]")
    add("add", "%a: bf16[T], %b: f32[]", "%y = add(%a, %b) : bf16[T]")
    for op in ("logical_and", "logical_or"):
        add(op, "%a: bool[T, 1], %b: bool[4]", f"%y = {op}(%a, %b) : bool[T, 4]")
    add("where", "%c: bool[T, 1], %a: f32[T, 4], %b: f32[]", "%y = where(%c, %a, %b) : f32[T, 4]")
    for source, to in (("f32", "bf16"), ("i64", "f32"), ("f32", "i32"), ("bool", "f32")):
        add("cast", f"%x: {source}[T]", f'%y = cast(%x, dtype="{to}") : {to}[T]')
    for op in ("sum", "mean", "amax", "amin", "argmax", "prod"):
        out = "i64" if op == "argmax" else "f32"
        add(op, "%x: f32[T, 8]", f"%y = {op}(%x, axis=1) : {out}[T]")
        add(op, "%x: f32[T, 8]", f"%y = {op}(%x, axis=-2, keepdim=true) : {out}[1, 8]")
    add("sum", "%x: i32[T, 8]", "%y = sum(%x, axis=0) : i32[8]")
    add("softmax", "%x: bf16[T, 8]", "%y = softmax(%x, axis=-1) : bf16[T, 8]")
    add("cumsum", "%x: i32[T, 8]", "%y = cumsum(%x, axis=0) : i32[T, 8]")
    add("reshape", "%x: f32[T, 8]", "%y = reshape(%x, shape=[2*T, 4]) : f32[2*T, 4]")
    add("permute", "%x: f32[T, 2, 4]", "%y = permute(%x, order=[1, 2, 0]) : f32[2, 4, T]")
    add("expand", "%x: f32[T, 1]", "%y = expand(%x, shape=[3, T, 5]) : f32[3, T, 5]")
    add("slice", "%x: f32[T, 9]", "%y = slice(%x, axis=-1, start=1, stop=8, step=2) : f32[T, 4]")
    add("slice", "%x: f32[T + 3, 2]", "%y = slice(%x, axis=0, start=T, stop=T + 3) : f32[3, 2]")
    add("concat", "%a: f32[T, 2], %b: f32[3, 2]", "%y = concat(%a, %b, %a, axis=0) : f32[2*T + 3, 2]")
    add("full", "%x: f32[T]", '%y = full(shape=[T, 2], value=-inf, dtype="f32") : f32[T, 2]', "%x, %y")
    add("iota", "%x: f32[T]", "%y = iota(size=T + 1) : i64[T + 1]", "%x, %y")
    add("gather_rows", "%x: f32[T, 8], %r: i32[R]", "%y = gather_rows(%x, %r) : f32[R, 8]")
    add("matmul", "%a: f32[3, T, 8], %b: f32[8, 5]", "%y = matmul(%a, %b) : f32[3, T, 5]")
    add(
        "aten", "%x: f32[T, 8]",
        '%v, %i = aten(%x, target="aten.sort.default", args=["%0", -1, false]) : f32[T, 8], i64[T, 8]', "%v, %i",
    )  # fmt: skip
    add(
        "aten", "%x: f32[T, 8]",
        '%y = aten(%x, target="aten.sum.dim_IntList", args=["%0", [0, 1]], kwargs=[["dtype", "dtype:f64"]]) : f64[]',
    )  # fmt: skip
    add(
        "call", "%x: f32[T, 8]",
        '%y = call(%x, fn=@other, params="layers.0") : f32[T, 8]',
        more=function("%a: f32[T, 8]", "%b = mul(%a, %w) : f32[T, 8]", "%b", "param %w : f32[8]", "other"),
    )  # fmt: skip
    add(
        "group", "%x: f32[T, 8]", "%y = group(%x, fn=@fused) : f32[T, 8]",
        more=function("%a: f32[T, 8]", "%b = exp(%a) : f32[T, 8]\n%c = add(%b, scalar=1.0) : f32[T, 8]", "%c", name="fused"),
    )  # fmt: skip
    found |= _model_samples()
    return found


def _model_samples() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}

    def add(op: str, inputs: str, body: str, result: str = "%y", decls: str = "") -> None:
        found.setdefault(op, []).append(function(inputs, body, result, decls))

    add("embedding", "%i: i32[T]", "%y = embedding(%i, %t) : f32[T, 32]", decls="param %t : f32[50, 32]")
    add(
        "embedding", "%i: i64[1, T]", '%y = embedding(%i, %t, dtype="bf16") : bf16[1, T, 64]',
        decls="param %t : q4_1[50, 64]",
    )  # fmt: skip
    for weight in ("bf16", "q4_0", "q4_1", "q8_0"):
        add(
            "linear", "%x: bf16[T, 64]", "%y = linear(%x, %w, %b) : bf16[T, 6]",
            decls=f"param %w : {weight}[6, 64]\nparam %b : bf16[6]",
        )  # fmt: skip
    add("linear", "%x: bf16[T, 8], %w: bf16[3, 8]", '%y = linear(%x, %w, out_dtype="f32") : f32[T, 3]')
    for attrs in ("eps=1e-06", "eps=1e-06, round_first=true", "eps=1e-06, offset=1.0"):
        add("rms_norm", "%x: bf16[T, 8], %w: bf16[8]", f"%y = rms_norm(%x, %w, {attrs}) : bf16[T, 8]")
        both = f"%n, %s = add_rms_norm(%x, %r, %w, {attrs}) : bf16[T, 8], bf16[T, 8]"
        add("add_rms_norm", "%x: bf16[T, 8], %r: bf16[T, 8], %w: bf16[8]", both, "%n, %s")
    add("rms_norm", "%x: f32[T, 8]", "%y = rms_norm(%x, eps=1e-05) : f32[T, 8]")
    add("layer_norm", "%x: f32[T, 8], %w: f32[8]", "%y = layer_norm(%x, %w, eps=1e-05) : f32[T, 8]")
    add("layer_norm", "%x: bf16[T, 8], %b: bf16[8]", "%y = layer_norm(%x, none, %b, eps=1e-05) : bf16[T, 8]")
    add(
        "add_layer_norm", "%x: f32[T, 8], %r: f32[T, 8], %w: f32[8], %b: f32[8]",
        "%n, %s = add_layer_norm(%x, %r, %w, %b, eps=1e-05) : f32[T, 8], f32[T, 8]", "%n, %s",
    )  # fmt: skip
    for layout, width in (("half", 8), ("repeat", 8), ("half_width", 4)):
        add(
            "rotary_table", "%p: i32[T], %f: f32[4]",
            f'%c, %s = rotary_table(%p, %f, layout="{layout}", dtype="bf16") : bf16[T, {width}], bf16[T, {width}]', "%c, %s",
        )  # fmt: skip
    for style, extra, width in (
        ("half", "", 8),
        ("interleaved", ", f32=true", 4),
        ("half", ", half_width=true", 4),
    ):
        add(
            "rope", f"%x: bf16[T, 2, 12], %c: bf16[T, {width}], %s: bf16[T, {width}]",
            f'%y = rope(%x, %c, %s, style="{style}", head_axis=-2{extra}) : bf16[T, 2, 12]',
        )  # fmt: skip
    add(
        "rope", "%x: f32[2, T, 8], %c: f32[T, 8], %s: f32[T, 8]",
        '%y = rope(%x, %c, %s, style="half", head_axis=-3) : f32[2, T, 8]',
    )  # fmt: skip
    qkv = "%q: f32[T, 4, 8], %k: f32[T, 2, 8], %v: f32[T, 2, 8]"
    for attrs in ("causal=true", "causal=true, window=3", "causal=false", "causal=true, softcap=20.0"):
        add("attention", qkv, f"%y = attention(%q, %k, %v, scale=0.25, {attrs}) : f32[T, 4, 8]")
    add(
        "attention",
        f"{qkv}, %s: f32[4]",
        "%y = attention(%q, %k, %v, %s, scale=1.0, causal=true) : f32[T, 4, 8]",
    )
    for act in ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "identity"):
        add(
            "gated_act", "%g: bf16[T, 8], %u: bf16[T, 8]", f'%y = gated_act(%g, %u, act="{act}") : bf16[T, 8]'
        )
        add("gated_act_packed", "%x: bf16[T, 8]", f'%y = gated_act_packed(%x, act="{act}") : bf16[T, 4]')
    add("softcap", "%x: f32[T, 8]", "%y = softcap(%x, cap=30.0) : f32[T, 8]")
    moe = "%x: f32[T, 8], %i: i64[T, 2], %w: f32[T, 2]"
    weights = "param %gu : f32[3, 12, 8]\nparam %d : f32[3, 8, 6]"
    add("experts", moe, '%y = experts(%x, %i, %w, %gu, %d, act="silu") : f32[T, 8]', decls=weights)
    add(
        "experts", moe,
        '%y = experts(%x, %i, %w, %gu, %d, %gb, %db, act="gpt_oss", interleaved=true, limit=7.0, alpha=1.702) : f32[T, 8]',
        decls=f"{weights}\nparam %gb : f32[3, 12]\nparam %db : f32[3, 8]",
    )  # fmt: skip
    add("topk", "%x: f32[T, 8]", "%v, %i = topk(%x, k=3) : f32[T, 3], i64[T, 3]", "%v, %i")
    for attrs in ('softmax="before", normalise=true, dtype="bf16"', 'softmax="after", dtype="bf16"'):
        add("route", "%x: bf16[T, 8]", f"%w, %i = route(%x, k=3, {attrs}) : bf16[T, 3], i64[T, 3]", "%w, %i")
    normed = "%x: f32[T, 32], %r: f32[T, 32], %n: f32[32], %w: f32[8, 32], %b: f32[8]"
    for args, attrs in (
        ("%w", "eps=1e-6"),
        ("%w, %b", 'eps=1e-6, offset=1.0, round_first=true, out_dtype="f64"'),
    ):
        dtype = "f64" if "f64" in attrs else "f32"
        line = f"%y, %s = norm_linear(%x, %r, %n, {args}, {attrs}) : {dtype}[T, 8], f32[T, 32]"
        add("norm_linear", normed, line, "%y, %s")
    for attrs in ("eps=1e-6", "eps=1e-6, offset=1.0, round_first=true"):
        line = f'%y, %s = norm_linear_gated(%x, %r, %n, %w, act="silu", {attrs}) : f32[T, 4], f32[T, 32]'
        add("norm_linear_gated", normed, line, "%y, %s")
    mlp = "%x: f32[T, 32], %w: f32[8, 32]"
    add("linear_gated", mlp, '%y = linear_gated(%x, %w, act="silu") : f32[T, 4]')
    add("linear_act", mlp, '%y = linear_act(%x, %w, act="gelu") : f32[T, 8]')
    add("linear_add", f"{mlp}, %r: f32[T, 8]", "%y = linear_add(%x, %w, %r) : f32[T, 8]")
    for args, attrs in (
        ("%w", 'softmax="before", normalise=true'),
        ("%w, %b", 'offset=1.0, round_first=true, softmax="after"'),
    ):
        add(
            "norm_route",
            normed,
            f'%y, %s, %p, %i = norm_route(%x, %r, %n, {args}, eps=1e-6, k=2, dtype="f32", {attrs})'
            " : f32[T, 32], f32[T, 32], f32[T, 2], i64[T, 2]",
            "%y, %s, %p, %i",
        )
    return found | _serving_samples()


def _serving_samples() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}

    def add(op: str, inputs: str, body: str, result: str = "%y", decls: str = "") -> None:
        found.setdefault(op, []).append(function(f"%step: step{inputs}", body, result, decls))

    shapes = {"query_start": "S + 1", "seq_lens": "S", "slots": "S", "sample_rows": "R"}
    for field in (
        "token_ids",
        "positions",
        "query_start",
        "seq_lens",
        "slots",
        "sample_rows",
        "adapter_id",
        "token_types",
    ):
        add("step_field", "", f'%y = step_field(%step, field="{field}") : i32[{shapes.get(field, "T")}]')
    add("step_field", "", '%y = step_field(%step, field="slots", extent=3) : i32[3]')
    kv = "state %kv : paged_kv<f32, heads=2, dim=8>"
    kv_window = "state %kv : paged_kv<bf16, heads=2, dim=8, window=5>"
    for extra, attrs in (("", "causal=false"), (", %s", "causal=true, window=5, softcap=9.0")):
        add(
            "varlen_attention", ", %q: bf16[T, 4, 8], %k: bf16[T, 2, 8], %v: bf16[T, 2, 8], %s: bf16[4]",
            f"%y = varlen_attention(%q, %k, %v, %step{extra}, scale=0.25, {attrs}) : bf16[T, 4, 8]",
        )  # fmt: skip
    write = "kv_write(%kv, %k, %v, %step)"
    add("kv_write", ", %k: f32[T, 2, 8], %v: f32[T, 2, 8]", write, "%k", kv)
    add(
        "paged_attention", ", %k: f32[T, 2, 8], %v: f32[T, 2, 8], %q: f32[T, 4, 8]",
        f"{write}\n%y = paged_attention(%q, %kv, %step, scale=0.25) : f32[T, 4, 8]", decls=kv,
    )  # fmt: skip
    add(
        "paged_attention", ", %k: bf16[T, 2, 8], %v: bf16[T, 2, 8], %q: bf16[T, 4, 8], %s: bf16[4]",
        f"{write}\n%y = paged_attention(%q, %kv, %step, %s, scale=0.25, window=5, softcap=9.0) : bf16[T, 4, 8]",
        decls=kv_window,
    )  # fmt: skip
    add(
        "qkv_rope_write",
        ", %x: f32[T, 64]",
        "%y = qkv_rope_write(%kv, %x, %step, heads=4) : f32[T, 4, 8]",
        decls=kv,
    )
    add(
        "qkv_rope_write", ", %x: f32[T, 64], %c: f32[T, 4], %s: f32[T, 4], %n: f32[8]",
        '%y = qkv_rope_write(%kv, %x, %step, %c, %s, %n, %n, heads=4, style="half", eps=1e-06) : f32[T, 4, 8]', decls=kv,
    )  # fmt: skip
    add(
        "qkv_attention", ", %x: f32[T, 64], %c: f32[T, 4], %s: f32[T, 4], %n: f32[8]",
        '%y = qkv_attention(%kv, %x, %step, %c, %s, %n, %n, heads=4, style="half", half_width=true, f32=true, eps=1e-06, '
        "offset=1.0, round_first=true, scale=0.5, softcap=9.0) : f32[T, 4, 8]", decls=kv,
    )  # fmt: skip
    add(
        "qkv_attention", ", %x: f32[T, 64], %i: f32[4]",
        "%y = qkv_attention(%kv, %x, %step, none, none, none, none, %i, heads=4, scale=0.5, window=3) : f32[T, 4, 8]", decls=kv_window,
    )  # fmt: skip
    add(
        "slot_conv", ", %x: f32[T, 6], %w: f32[6, 4]", "%y = slot_conv(%x, %c, %w, %step) : f32[T, 6]",
        decls="state %c : slot_conv<f32, channels=6, width=3>",
    )  # fmt: skip
    add(
        "adapter_add", ", %x: f32[T, 8], %y0: f32[T, 6], %a: f32[3, 2, 8], %b: f32[3, 6, 2]",
        '%i = step_field(%step, field="adapter_id") : i32[T]\n%y = adapter_add(%x, %y0, %a, %b, %i) : f32[T, 6]',
    )  # fmt: skip
    add("all_reduce", ", %x: f32[T, 8]", '%y = all_reduce(%x, axis="tp") : f32[T, 8]')
    return found


SAMPLES = _samples()
ALL = [(op, text) for op in all_ops() for text in SAMPLES.get(op, [])]
IDS = [f"{op}-{i}" for op in all_ops() for i in range(len(SAMPLES.get(op, [])))]
