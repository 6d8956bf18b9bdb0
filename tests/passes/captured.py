"""Captured modules as models/ makes them, written as text: batch axis 1, reshape and permute around attention."""

from dataclasses import dataclass

from compilerllm.ir.graph import Module
from compilerllm.ir.text import parse_module


@dataclass(frozen=True)
class Decoder:
    """A small llama-like decoder and the ways other families differ from it."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    ffn: int = 64
    vocab: int = 48
    dtype: str = "bf16"
    bias: bool = False  # qwen2
    qk_norm: bool = False  # qwen3, gemma3
    packed: bool = False  # phi3
    window: int = 0  # mistral
    weights: str | None = None  # a packed dtype for linears
    factor: float | None = None  # granite: residual multiplier
    max_tokens: int = 4096

    def module(self) -> Module:
        return parse_module(self.text())

    def text(self) -> str:
        return self.main() + self.layer()

    def main(self) -> str:
        x, d = f"{self.dtype}[1, T, {self.hidden}]", self.dtype
        calls = "\n".join(
            f'  %h{i + 1} = call(%h{i}, %cos, %sin, fn=@layer, params="model.layers.{i}", states="{i}") : {x}'
            for i in range(self.layers)
        )
        freq = [10000.0 ** (-2 * i / self.dim) for i in range(self.dim // 2)]
        return f"""
func @main(%input_ids: i64[1, T], %positions: i64[1, T]) {{
  dim T in [1, {self.max_tokens}]
  param %model.embed_tokens.weight : {d}[{self.vocab}, {self.hidden}]
  param %model.inv_freq : f32[{self.dim // 2}] = literal("f32", [{self.dim // 2}], {freq})
  param %model.norm.weight : {d}[{self.hidden}]
  param %lm_head.weight : {d}[{self.vocab}, {self.hidden}] = read("model.embed_tokens.weight")
  %h0 = embedding(%input_ids, %model.embed_tokens.weight) : {x}
  %cos, %sin = rotary_table(%positions, %model.inv_freq, layout="half", dtype="{d}") : {d}[1, T, {self.dim}], {d}[1, T, {self.dim}]
{calls}
  %n = rms_norm(%h{self.layers}, %model.norm.weight, eps=1e-06, round_first=true) : {x}
  %logits = linear(%n, %lm_head.weight) : {d}[1, T, {self.vocab}]
  return %logits
}}
"""

    def projection(
        self, out: str, x: str, name: str, rows: int, columns: int, bias: bool = False
    ) -> tuple[str, str]:
        """Declarations and node of one linear."""
        w = self.weights or self.dtype
        decl = f"  param %{name}.weight : {w}[{rows}, {columns}]\n"
        tail = ""
        if bias:
            decl += f"  param %{name}.bias : {self.dtype}[{rows}]\n"
            tail = f", %{name}.bias"
        return decl, f"  %{out} = linear(%{x}, %{name}.weight{tail}) : {self.dtype}[1, T, {rows}]\n"

    def heads_of(self, what: str, heads: int) -> str:
        """A projection as [1, H, T, D], normed where the family does so."""
        d, t = self.dtype, f"[1, T, {heads}, {self.dim}]"
        text = f"  %{what}v = reshape(%{what}p, shape={t}) : {d}{t}\n"
        last = f"{what}v"
        if self.qk_norm and what != "v":
            text += f"  %{what}n = rms_norm(%{last}, %self_attn.{what}_norm.weight, eps=1e-06, round_first=true) : {d}{t}\n"
            last = f"{what}n"
        text += f"  %{what}t = permute(%{last}, order=[0, 2, 1, 3]) : {d}[1, {heads}, T, {self.dim}]\n"
        return text

    def layer(self) -> str:
        d, dim, hidden = self.dtype, self.dim, self.hidden
        x = f"{d}[1, T, {hidden}]"
        q_rows, kv_rows = self.heads * dim, self.kv_heads * dim
        decls = f"  param %input_layernorm.weight : {d}[{hidden}]\n  param %post_attention_layernorm.weight : {d}[{hidden}]\n"
        body = f"  %n1 = rms_norm(%x, %input_layernorm.weight, eps=1e-06, round_first=true) : {x}\n"
        if self.packed:
            total = q_rows + 2 * kv_rows
            decl, node = self.projection("qkv", "n1", "self_attn.qkv_proj", total, hidden, self.bias)
            decls, body = decls + decl, body + node
            at = 0
            for what, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                body += (
                    f"  %{what}p = slice(%qkv, axis=2, start={at}, stop={at + rows}) : {d}[1, T, {rows}]\n"
                )
                at += rows
        else:
            for what, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                decl, node = self.projection(
                    f"{what}p", "n1", f"self_attn.{what}_proj", rows, hidden, self.bias
                )
                decls, body = decls + decl, body + node
        if self.qk_norm:
            decls += f"  param %self_attn.q_norm.weight : {d}[{dim}]\n  param %self_attn.k_norm.weight : {d}[{dim}]\n"
        for what, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            body += self.heads_of(what, heads)
        for what, heads in (("q", self.heads), ("k", self.kv_heads)):
            body += f'  %{what}r = rope(%{what}t, %cos, %sin, style="half", head_axis=-3) : {d}[1, {heads}, T, {dim}]\n'
        for what, last, heads in (
            ("q", "qr", self.heads),
            ("k", "kr", self.kv_heads),
            ("v", "vt", self.kv_heads),
        ):
            body += f"  %{what}f = permute(%{last}, order=[0, 2, 1, 3]) : {d}[1, T, {heads}, {dim}]\n"
            body += f"  %{what}a = reshape(%{what}f, shape=[T, {heads}, {dim}]) : {d}[T, {heads}, {dim}]\n"
        window = f", window={self.window}" if self.window else ""
        body += f"  %a = attention(%qa, %ka, %va, scale={dim**-0.5}, causal=true{window}) : {d}[T, {self.heads}, {dim}]\n"
        body += f"  %ab = reshape(%a, shape=[1, T, {self.heads}, {dim}]) : {d}[1, T, {self.heads}, {dim}]\n"
        body += f"  %ac = reshape(%ab, shape=[1, T, {q_rows}]) : {d}[1, T, {q_rows}]\n"
        decl, node = self.projection("o", "ac", "self_attn.o_proj", hidden, q_rows)
        decls, body = decls + decl, body + node
        body += self.residual("x1", "x", "o")
        body += (
            f"  %n2 = rms_norm(%x1, %post_attention_layernorm.weight, eps=1e-06, round_first=true) : {x}\n"
        )
        f = f"{d}[1, T, {self.ffn}]"
        if self.packed:
            decl, node = self.projection("gu", "n2", "mlp.gate_up_proj", 2 * self.ffn, hidden)
            decls, body = decls + decl, body + node
            body += f"  %g = slice(%gu, axis=2, start=0, stop={self.ffn}) : {f}\n"
            body += f"  %u = slice(%gu, axis=2, start={self.ffn}, stop={2 * self.ffn}) : {f}\n"
            body += f"  %s = silu(%g) : {f}\n  %m = mul(%u, %s) : {f}\n"
        else:
            for out, name in (("g", "gate_proj"), ("u", "up_proj")):
                decl, node = self.projection(out, "n2", f"mlp.{name}", self.ffn, hidden)
                decls, body = decls + decl, body + node
                if out == "g":
                    body += f"  %s = silu(%g) : {f}\n"
            body += f"  %m = mul(%s, %u) : {f}\n"
        decl, node = self.projection("y", "m", "mlp.down_proj", hidden, self.ffn)
        decls, body = decls + decl, body + node
        body += self.residual("x2", "x1", "y")
        table = f"{d}[1, T, {dim}]"
        head = f"func @layer(%x: {x}, %cos: {table}, %sin: {table}) {{\n  dim T in [1, {self.max_tokens}]\n"
        return head + decls + body + "  return %x2\n}\n"

    def residual(self, out: str, base: str, update: str) -> str:
        x = f"{self.dtype}[1, T, {self.hidden}]"
        if self.factor is None:
            return f"  %{out} = add(%{base}, %{update}) : {x}\n"
        scaled = f"  %{update}s = mul(%{update}, scalar={self.factor}) : {x}\n"
        return scaled + f"  %{out} = add(%{base}, %{update}s) : {x}\n"
