"""Proves that a kernel may start before its predecessor has ended.

With programmatic dependent launch a kernel begins while the one before it still runs, up to ``griddepcontrol.wait``.
Before the wait it may read only what no kernel of the step writes, and must write nothing. Both are read off the PTX:
every load before the wait is traced back, register by register, to the arguments its address is made of; the launch
is safe if all of those are parameters of the model. The same trace refuses branches before the wait, since a program
that leaves early without waiting would let the kernel after next start too soon.
"""

import re
from collections.abc import Iterable, Sequence

from compilerllm.kernels.errors import KernelError
from compilerllm.kernels.launch.gpu.program import Kernel, Launch, Pointer

_WAIT = "griddepcontrol.wait"
_ENTRY = re.compile(r"\.visible \.entry .*?\n\{(.*)\n\}", re.S)
_COMMENT = re.compile(r"//[^\n]*")
# Before an instruction: labels, braces of inline assembly, a predicate.
_LEAD = re.compile(r"^(?:\$?\w+:\s*|[{}]\s*|@!?%\w+\s+)*")
_PARAM = re.compile(r"_param_(\d+)")
_REGISTER = re.compile(r"%[a-zA-Z]+\d*")
_LOADS = re.compile(r"^(ld\.global|ld\.volatile\.global|cp\.async\.\w+\.shared\.global|prefetch)")
_STORES = re.compile(r"^(st\.global|st\.volatile|red\.|atom\.|cp\.reduce|cp\.async\.bulk)")
_LEAVES = re.compile(r"^(bra|ret|exit|brx)\b")


class UnsafePrefetch(KernelError):
    """A kernel that would read or write before its wait what another kernel of the step writes."""


def early_arguments(ptx: str, name: str) -> tuple[int, ...]:
    """Indices of the arguments whose memory a kernel reads before its wait, sorted.

    Raises ``UnsafePrefetch`` where it writes before, may leave before, never waits, or loads from an address that
    cannot be traced to arguments.
    """
    found = _ENTRY.search(ptx)
    body = found.group(1) if found else ptx
    if _WAIT not in body:
        raise UnsafePrefetch(f"{name} is launched dependently but never waits for its predecessor")
    sources: dict[str, frozenset[int]] = {}
    early: set[int] = set()
    for piece in _COMMENT.sub("", body).split(";"):
        code = _LEAD.sub("", " ".join(piece.split()))
        if _WAIT in code:
            return tuple(sorted(early))
        if _LEAVES.match(code):
            raise UnsafePrefetch(f"{name} may branch or leave before it waits: {code}")
        if _STORES.match(code):
            raise UnsafePrefetch(f"{name} writes before it waits for its predecessor: {code}")
        _follow(code, sources, early, name)
    raise UnsafePrefetch(f"{name}: no wait was found on its straight path")


def _follow(code: str, sources: dict[str, frozenset[int]], early: set[int], name: str) -> None:
    operation = code.split(None, 1)
    if len(operation) < 2:
        return
    mnemonic, rest = operation
    registers = _REGISTER.findall(rest)
    if mnemonic.startswith("ld.param"):
        index = _PARAM.search(rest)
        if index and registers:
            for register in _results(rest):
                sources[register] = frozenset((int(index.group(1)),))
        return
    if _LOADS.match(mnemonic):
        address = rest.split("[")[-1] if not mnemonic.startswith("cp.async") else rest.split("[")[2]
        made_of = frozenset[int]().union(
            *(sources.get(r, frozenset()) for r in _REGISTER.findall(address.split("]")[0]))
        )
        if not made_of:
            raise UnsafePrefetch(f"{name} loads before its wait from an address of unknown origin: {code}")
        early |= made_of
        for register in _results(rest):
            sources[register] = frozenset()
        return
    if not registers:
        return
    results = _results(rest)
    inputs = [r for r in registers if r not in results]
    joined = frozenset[int]().union(*(sources.get(r, frozenset()) for r in inputs))
    for register in results:
        sources[register] = joined


def _results(operands: str) -> list[str]:
    """Registers an instruction writes: a list in braces, or the first one."""
    first = operands.lstrip()
    if first.startswith("{"):
        return _REGISTER.findall(first[: first.index("}")])
    if first.startswith("["):
        return []
    return _REGISTER.findall(first.split(",")[0])


def check_launches(launches: Iterable[Launch], kernels: Sequence[Kernel]) -> None:
    """Raise ``UnsafePrefetch`` for a launch whose kernel reads anything but parameters before its wait.

    Parameters are written by no kernel: nothing but loading fills them.
    """
    for launch in launches:
        kernel = kernels[launch.kernel]
        for index in kernel.early:
            argument = launch.args[index] if index < len(launch.args) else None
            if isinstance(argument, Pointer) and argument.space != "param":
                raise UnsafePrefetch(
                    f"{kernel.template} reads {argument.space} {argument.name} before it waits for the kernel that may "
                    f"write it ({launch.node})"
                )
