"""Cross-compilation: kernel sources to cubins, with no GPU present, through a content-addressed cache."""

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from compilerllm.kernels.errors import KernelError
from compilerllm.kernels.kept import damaged, sha256, write_whole
from compilerllm.kernels.triton.prefetch import early_arguments
from compilerllm.kernels.triton.source import KernelSource, _generated, function
from compilerllm.kernels.triton.target import CudaTarget

log = logging.getLogger(__name__)


class KernelBuildError(KernelError):
    """A kernel that Triton cannot compile for the target, or whose launch ABI our launcher does not know."""


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel: machine code and what a launch must know."""

    key: str
    name: str
    num_warps: int
    shared: int
    file: Path
    early: tuple[int, ...] = ()  # arguments read before the wait (``prefetch``)


def tool_versions() -> tuple[str, ...]:
    """What a cubin depends on beside its source."""
    import triton

    return (f"triton {triton.__version__}",)


def compile_source(source: KernelSource, capability: int) -> tuple[bytes, dict[str, Any]]:
    """Machine code and metadata of one kernel. Raises ``KernelBuildError``.

    Line information is off, so that equal kernels are equal bytes wherever the source lies; contraction of a * b + c is
    on, whatever Triton's default.
    """
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn = function(source.template)
    names = list(fn.arg_names)
    constants = dict(source.constexprs)
    types = dict(source.signature)
    signature = {n: types.get(n, "constexpr") for n in names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n].startswith("*") and n not in source.unaligned
    }
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages, "enable_fp_fusion": True}
    if source.pdl:
        options["launch_pdl"] = True
    if source.registers:
        options["maxnreg"] = source.registers
    try:
        compiled = triton.compile(
            ASTSource(fn=fn, signature=signature, constexprs={(names.index(n),): v for n, v in constants.items()}, attrs=attrs),
            target=GPUTarget("cuda", capability, 32), options=options,
        )  # fmt: skip
    except Exception as error:
        raise KernelBuildError(
            f"Triton cannot compile {source.template} for sm_{capability} with {dict(source.constexprs)}, "
            f"{source.num_warps} warps: {type(error).__name__}: {error}"
        ) from error
    meta = compiled.metadata
    for scratch in ("global_scratch_size", "profile_scratch_size"):
        if getattr(meta, scratch, 0):
            raise KernelBuildError(
                f"{source.template} needs {scratch} {getattr(meta, scratch)}, which our launcher does not provide; "
                "write the kernel without device-side descriptors"
            )
    early = early_arguments(compiled.asm["ptx"], source.template) if source.pdl else ()
    facts = {"name": meta.name, "num_warps": meta.num_warps, "shared": meta.shared, "early": list(early)}
    return compiled.asm["cubin"], facts


# A source, its key, the target's capability, the cache's folder, texts of generated modules.
Order = tuple[KernelSource, str, int, str, Mapping[str, str]]


def _job(order: Order) -> str:
    source, key, capability, folder, texts = order
    _generated.update(texts)
    code, meta = compile_source(source, capability)
    _write(Path(folder), key, code, meta)
    return key


def _write(folder: Path, key: str, code: bytes, meta: dict[str, Any]) -> None:
    """Both files appear whole or not at all; the description last, so that what it describes is there."""
    write_whole(folder / f"{key}.cubin", code)
    write_whole(folder / f"{key}.json", json.dumps(meta | {"sha256": sha256(code)}).encode())


def _read(folder: Path, key: str) -> Cubin | None:
    """What ``_write`` kept; None where it is missing or damaged."""
    file = folder / f"{key}.cubin"
    try:
        meta, code = json.loads((folder / f"{key}.json").read_text()), file.read_bytes()
        whole = meta["sha256"] == sha256(code)
    except (OSError, ValueError, KeyError, TypeError):  # missing, or by a version that noted no hash
        return None
    if not whole and not damaged(file):
        return None
    return Cubin(key, meta["name"], meta["num_warps"], meta["shared"], file, tuple(meta["early"]))


SPAWNED_WORKERS = 4  # each has imported torch and Triton for itself


def _start_method() -> str:
    """Forking is quick, but not for a process that has opened a GPU: then workers import everything again."""
    import torch

    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return "spawn" if started else "fork"


def _compile_in_processes(
    orders: Sequence[Order], workers: int, on_left: Callable[[int], None], is_missing: Callable[[str], bool]
) -> None:
    """Compile each order, several at once. Where a process dies, for want of memory or because Triton crashed, the rest are
    compiled by a quarter as many; by one at last. Raises ``KernelBuildError``.

    on_left: told how many are left.
    """
    method = _start_method()
    workers = min(workers, len(orders), workers if method == "fork" else SPAWNED_WORKERS)
    left = len(orders)
    with ProcessPoolExecutor(workers, mp_context=get_context(method)) as pool:
        try:
            for future in as_completed([pool.submit(_job, order) for order in orders]):
                future.result()
                left -= 1
                on_left(left)
            return
        except BrokenProcessPool as error:
            rest = [o for o in orders if is_missing(o[1])]
            if not rest:  # it died behind its last one
                on_left(0)
                return
            source, _, capability = rest[0][:3]
            if workers == 1:
                raise KernelBuildError(
                    f"a compiler's process ended while {source.template} was compiled for sm_{capability}: memory ran out, or "
                    f"Triton crashed. Its constants: {dict(source.constexprs)}."
                ) from error
            log.warning(
                "A compiler's process ended while %s or another kernel was compiled: memory ran out, or Triton crashed. "
                "%d kernels are left, for fewer processes.", source.template, len(rest),
            )  # fmt: skip
    _compile_in_processes(rest, max(1, workers // 4), on_left, is_missing)


def build_kernels(
    sources: Iterable[KernelSource],
    target: CudaTarget,
    cache: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    workers: int | None = None,
) -> dict[KernelSource, Cubin]:
    """A cubin for each source, compiled in parallel where ``cache`` has none. Raises ``KernelBuildError``.

    A kernel that wants more shared memory than the target has is an error too.
    """
    folder = cache / target.arch
    tools = tool_versions()
    keys = {s: s.key(target.arch, *tools) for s in dict.fromkeys(sources)}
    missing = {k: s for s, k in keys.items() if _read(folder, k) is None}
    done, total = len(keys) - len(missing), len(keys)
    on_progress(done, total)
    orders = [(s, k, target.capability, str(folder), dict(_generated)) for k, s in missing.items()]
    workers = workers or len(os.sched_getaffinity(0))
    if workers == 1 or len(orders) == 1:
        for order in orders:
            _job(order)
            done += 1
            on_progress(done, total)
    elif orders:
        _compile_in_processes(
            orders,
            workers,
            lambda left: on_progress(total - left, total),
            lambda key: _read(folder, key) is None,
        )
    built = {s: _read(folder, k) for s, k in keys.items()}
    result: dict[KernelSource, Cubin] = {}
    for source, cubin in built.items():
        if cubin is None:
            raise KernelBuildError(f"{source.template}: the cubin vanished from {folder}; is the disk full?")
        if cubin.shared > target.shared:
            raise KernelBuildError(
                f"{source.template} with {dict(source.constexprs)} needs {cubin.shared:,} bytes of shared memory; "
                f"{target.arch} has {target.shared:,}"
            )
        result[source] = cubin
    return result
