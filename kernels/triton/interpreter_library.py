"""Lets Triton's interpreter run Triton's own library (``tl.sum``, ``tl.max`` ...), whose functions it takes for compiled.

Triton decides whether a function is interpreted where it is decorated. Its library is decorated when Triton is imported,
which is for compilation here. So the library is interpreted when it is called, and only within an interpreted kernel.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any


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
