"""Builds the recorder that stands in for the CUDA driver."""

import re
import subprocess
from pathlib import Path


def build_recorder(folder: Path) -> Path:
    """``libcuda.so.1`` in ``folder``: records launches; whatever else Triton's C code calls succeeds and does nothing."""
    import triton.backends.nvidia.driver as driver

    nvidia = Path(driver.__file__).parent
    called = set(re.findall(r"\b(cu[A-Z]\w+)\(", (nvidia / "driver.c").read_text()))
    called |= set(re.findall(r"\b(cu[A-Z]\w+)\(", Path(driver.__file__).read_text()))
    called |= {
        "cuStreamIsCapturing",
        "cuModuleUnload",
        "cuCtxGetDevice",
        "cuDriverGetVersion",
        "cuPointerGetAttributes",
    }
    called -= {"cuLaunchKernelEx"}
    folder.mkdir(exist_ok=True)
    rest = folder / "rest.c"
    rest.write_text(
        "\n".join(f"int {n}{v}(void) {{ return 0; }}" for n in sorted(called) for v in ("", "_v2"))
    )
    library = folder / "libcuda.so.1"
    source = Path(__file__).with_name("recorder.c")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-I", nvidia / "include", "-o", library, source, rest, "-Wl,-soname,libcuda.so.1"],
        check=True,
    )  # fmt: skip
    link = folder / "libcuda.so"
    if not link.exists():
        link.symlink_to(library.name)
    return library
