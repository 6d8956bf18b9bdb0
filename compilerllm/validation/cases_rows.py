"""Cases of kernels that work row by row or element by element: norms, embeddings, rotary tables, routes, groups."""

from compilerllm.validation.kernel_case import ACTS, CPU, CUDA, KernelCase, module


def norms() -> list[KernelCase]:
    """Cases of the family."""
    body = """%x = slice(%q, axis=1, start=0, stop=40) : $[T, 40]
        %r = slice(%q, axis=1, start=48, stop=88) : $[T, 40]
        %a = rms_norm(%x, %w, eps=1e-05, round_first=true) : $[T, 40]
        %c = rms_norm(%x, eps=0.001) : $[T, 40]
        %d = rms_norm(%x, %w, eps=1e-05, offset=1.0) : $[T, 40]
        %e, %f = add_rms_norm(%x, %r, %w, eps=1e-05, offset=1.0, round_first=true) : $[T, 40], $[T, 40]
        %g = layer_norm(%x, %w, %b, eps=1e-05) : $[T, 40]
        %h = layer_norm(%x, none, %b, eps=1e-05) : $[T, 40]
        %i, %j = add_layer_norm(%x, %r, %w, %b, eps=1e-05) : $[T, 40], $[T, 40]
        %k = layer_norm(%x, %w, %b, eps=1e-05, round_first=true) : $[T, 40]
        %l, %m = add_layer_norm(%x, %r, %w, eps=1e-05, round_first=true) : $[T, 40], $[T, 40]"""
    declared = "param %w : $[40]\nparam %b : $[40]"
    results = "%a, %c, %d, %e, %f, %g, %h, %i, %j, %k, %l, %m"
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


def embeddings() -> list[KernelCase]:
    """Cases of the family."""
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
    packed = "".join(
        f'%{to} = embedding(%i, %{table}, dtype="bf16") : bf16[T, 64]\n' for to, table in ("yt", "zu", "vw")
    )
    packed += "%a = linear(%y, %t) : bf16[T, 20]\n%b = linear(%y, %u) : bf16[T, 20]\n%c = linear(%y, %w) : bf16[T, 20]"
    declared = "param %t : q4_1[20, 64]\nparam %u : q4_0[20, 64]\nparam %w : q8_0[20, 64]"
    made += [
        KernelCase(
            "embed", f"packed tables, {tokens}", module("%i: i32[T]", packed, "%y, %z, %v, %a, %b, %c", declared),
            tokens, below=20, targets=(CPU,),
        )
        for tokens in (1, 6)
    ]  # fmt: skip
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


def rotations() -> list[KernelCase]:
    """Cases of the family."""
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
                    targets=(CUDA, CPU) if dtype == "f32" else (CUDA,),
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


def routes() -> list[KernelCase]:
    """Cases of the family."""
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


def groups() -> list[KernelCase]:
    """Cases of the family."""
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
    pieces = {"groups.WIDEST_ROW": 16, "emit_groups.WIDEST_ROW": 16}
    made += [
        KernelCase("groups", "rows", text, 5),
        KernelCase("groups", "rows in pieces", text, 3, limits=pieces, targets=(CUDA,)),
    ]
    holes = "%a = add(%x, scalar=1.5) : $[T, 37]\n%b = sqrt(%a) : $[T, 37]\n" + rows.rpartition("\n")[0]
    results = [f"%r{i}" for i in range(6)]
    text = module("%x: $[T, 37]", holes.replace("(%x, axis", "(%b, axis"), ", ".join(results))
    made += [
        KernelCase("groups", "rows with NaN", text, 9),
        KernelCase("groups", "rows with NaN in pieces", text, 9, limits=pieces, targets=(CUDA,)),
    ]
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
    truths = """%a = lt(%x, %y) : bool[T, 21]
        %b = ge(%x, scalar=0.5) : bool[T, 21]
        %c = logical_and(%a, %b) : bool[T, 21]
        %d = where(%c, %x, %y) : $[T, 21]
        %e = logical_not(%a) : bool[T, 21]"""
    text = module("%x: $[T, 21], %y: $[T, 21]", truths, "%a, %b, %c, %d, %e")
    made.append(KernelCase("groups", "truth values", text, 5))
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
