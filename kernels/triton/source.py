"""A kernel before it is compiled: template, types, constants. Its key names the cubin and its tuning entry."""

import hashlib
import importlib
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from compilerllm.kernels.triton import interpreter_library

ConstValue = int | float | bool | str | None


@dataclass(frozen=True)
class KernelSource:
    """``template`` is "module:function" in ``templates`` (or a generated module's, see ``generated``).

    signature: run-time arguments in the function's order, with Triton's type names; pointers are promised to be
    16-byte aligned, but for those in ``unaligned``. constexprs: all the others. registers: the most a thread may have,
    so that more programs share a multiprocessor; 0 leaves it to the compiler.
    """

    template: str
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, ConstValue], ...]
    num_warps: int = 4
    num_stages: int = 3
    pdl: bool = False
    unaligned: tuple[str, ...] = ()
    registers: int = 0

    @staticmethod
    def of(
        template: str,
        types: Mapping[str, str],
        constexprs: Mapping[str, ConstValue],
        *,
        num_warps: int = 4,
        num_stages: int = 3,
        pdl: bool = False,
        unaligned: tuple[str, ...] = (),
        registers: int = 0,
    ) -> "KernelSource":
        """Orders arguments as the function does. Raises ``TypeError`` where one is missing or unknown."""
        names = argument_names(template)
        given = set(types) | set(constexprs)
        if given != set(names):
            raise TypeError(
                f"{template} takes {', '.join(names)}; missing: {sorted(set(names) - given)}, unknown: {sorted(given - set(names))}"
            )
        return KernelSource(
            template, tuple((n, types[n]) for n in names if n in types),
            tuple((n, constexprs[n]) for n in names if n in constexprs), num_warps, num_stages, pdl, unaligned,
            registers,
        )  # fmt: skip

    def key(self, *tools: str) -> str:
        """Content hash of the description, of the template's source with all it calls, and of ``tools`` (versions)."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        digest.update(source_text(self.template.partition(":")[0]).encode())
        for tool in tools:
            digest.update(b"\0" + tool.encode())
        return digest.hexdigest()[:32]


_TEMPLATES = Path(__file__).parent / "templates"
_generated: dict[str, str] = {}  # module name -> source


def generated(text: str) -> str:
    """Register a generated module's source; gives its module name, the same for the same text."""
    name = "generated_" + hashlib.sha256(text.encode()).hexdigest()[:16]
    _generated.setdefault(name, text)
    return name


_IMPORT = re.compile(r"^from \.(\w+) import", re.M)


@cache
def source_text(module: str) -> str:
    """Source of a template module, then of every module of the package that it imports, directly or not."""
    found: dict[str, str] = {}
    wanted = [module]
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        found[name] = _generated[name] if name in _generated else (_TEMPLATES / f"{name}.py").read_text()
        wanted += _IMPORT.findall(found[name])
    return "\0".join((found.pop(module), *(found[name] for name in sorted(found))))


@cache
def function(template: str, interpreted: bool = False) -> Any:
    """The template as Triton's JITFunction, or as its interpreter's function."""
    import triton

    module, _, name = template.partition(":")
    if interpreted:
        interpreter_library.enable()
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpreted
        if module in _generated:
            return getattr(_load_generated(module, interpreted), name)
        package = "interpreted" if interpreted else "templates"
        return getattr(importlib.import_module(f"compilerllm.kernels.triton.{package}.{module}"), name)


@cache
def _load_generated(module: str, interpreted: bool) -> Any:
    """Execute a generated module. Triton reads a kernel's source by inspect, which finds it in linecache."""
    import linecache
    import types

    text = _generated[module]
    package = "interpreted" if interpreted else "templates"
    full = f"compilerllm.kernels.triton.{package}.{module}"
    made = types.ModuleType(full)
    made.__package__ = f"compilerllm.kernels.triton.{package}"
    file = f"<{module}>"
    made.__file__ = file
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), made.__dict__)
    return made


@cache
def argument_names(template: str) -> tuple[str, ...]:
    """Arguments of a template's function, constexprs included."""
    return tuple(inspect.signature(function(template).fn).parameters)
