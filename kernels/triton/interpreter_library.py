"""Makes Triton's interpreter fit for proofs: it runs Triton's own library and rounds to bf16 as hardware does.

Triton decides whether a function is interpreted where it is decorated. Its library (``tl.sum``, ``tl.max`` ...) is
decorated when Triton is imported, which is for compilation here. So the library is interpreted when it is called, and
only within an interpreted kernel. The interpreter's own conversion to bf16 cuts bits off, and its products of bf16 tiles
multiply bits.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np


@cache
def enable() -> None:
    """Teach Triton's interpreter, once for the process. Compilation is not touched: it calls nothing."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    patch_language: Any = interpreter._patch_lang
    running = [False]

    class Once:
        """What is patched for the outermost kernel is patched for all it calls."""

        def __init__(self, scope: Any) -> None:
            self.scope = scope
            running[0] = True
            # numbers are arrays of one element to the interpreter, which numpy takes for a loop's bounds no more
            tl.tensor.__index__ = lambda tensor: int(tensor.handle.data.item())

        def restore(self) -> None:
            self.scope.restore()
            running[0] = False

    def patch_once(fn: Any) -> Any:
        if running[0]:
            return SimpleNamespace(restore=lambda: None)
        return Once(patch_language(SimpleNamespace(__globals__={"tl": tl, "core": tl.core})))

    @cache
    def rewritten(function: Any) -> Any:
        return interpreter.InterpretedFunction(function).rewrite()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not running[0]:
            raise RuntimeError(f"{self.fn.__name__} can only be called in a kernel")
        return rewritten(self.fn)(*args, **kwargs)

    interpreter._patch_lang = patch_once
    JITFunction.__call__ = call
    _round_to_nearest(interpreter, tl)


def _round_to_nearest(interpreter: Any, tl: Any) -> None:
    builder = interpreter.InterpreterBuilder
    convert, cast, dot = builder.create_fp_to_fp, builder.cast_impl, builder.create_dot

    def through_f32(source: Any, target: Any) -> Any:
        """Between f32 and bf16; None for other conversions."""
        pair = source.dtype.scalar, target.scalar
        if pair == (tl.float32, tl.bfloat16):
            bits = np.asarray(source.data, np.float32, order="C").view(np.uint32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            data = np.where(np.isnan(source.data), 0x7FC0, rounded).astype(np.uint16)
        elif pair == (tl.bfloat16, tl.float32):
            data = (source.data.astype(np.uint32) << 16).view(np.float32)
        else:
            return None
        return interpreter.TensorHandle(data, target.scalar)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        found = through_f32(source, target)
        return cast(self, source, target) if found is None else found

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        found = through_f32(source, target)
        return convert(self, source, target, rounding) if found is None else found

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = [through_f32(x, tl.float32) for x in (a, b)]
        return dot(self, a if wide[0] is None else wide[0], b if wide[1] is None else wide[1], *rest)

    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = cast_impl, create_fp_to_fp, create_dot
