"""Run in a process of its own: launch a kernel as the installed Triton does, with a recorder in the driver's place.

Arguments: the recorder library; the case as JSON. Prints what the driver was told, in hex.
"""

import ctypes
import json
import sys
from types import SimpleNamespace
from typing import Any


def main(library: str, case: dict[str, Any]) -> None:
    """Compile the case's kernel for sm_90 and launch it through Triton's own launcher."""
    recorder = ctypes.CDLL(library)
    sizes = (ctypes.c_int * len(case["sizes"]))(*case["sizes"])
    recorder.recorder_expect(sizes, len(sizes))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
    from triton.compiler import ASTSource

    import compilerllm.kernels.triton.source as source

    fn = source.function(source.generated(case["text"]) + ":" + case["function"])
    names = list(fn.arg_names)
    signature = {n: case["types"].get(n, "constexpr") for n in names}
    constants = {(names.index(n),): v for n, v in case["constants"].items()}
    options = {"num_warps": case["num_warps"], "launch_pdl": case["pdl"]}
    compiled = triton.compile(
        ASTSource(fn=fn, signature=signature, constexprs=constants, attrs={}),
        target=GPUTarget("cuda", 90, 32),
        options=options,
    )
    triton.runtime.driver.set_active(SimpleNamespace(utils=CudaUtils()))
    launcher = CudaLauncher(compiled.src, compiled.metadata)
    meta = compiled.metadata
    packed = (meta.num_warps, meta.num_ctas, meta.shared)
    values = [case["values"].get(n, case["constants"].get(n)) for n in names]
    launcher(*case["grid"], case["stream"], case["handle"], packed, None, None, None, *values)
    out = (ctypes.c_ubyte * 4096)()
    length = recorder.recorder_read(out)
    print(
        json.dumps(
            {"version": triton.__version__, "shared": meta.shared, "record": bytes(out[:length]).hex()}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
