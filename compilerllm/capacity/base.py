"""What an engine's process takes on a CPU before anything is loaded: measured in one, now."""

import subprocess
import sys
from functools import cache

from compilerllm.errors import CompilerLLMError

# Everything that an engine's process imports, and nothing else.
_PROGRAM = """
import compilerllm.loading, compilerllm.runtime.process, compilerllm.runtime.engine, torch
from compilerllm.kernels.launch.host_memory import resident
print(resident())
"""


class CannotMeasure(CompilerLLMError):
    """The process that was to be measured ended with an error."""


@cache
def base_bytes() -> int:
    """Resident bytes of Python, torch and this package, on this machine with these versions."""
    done = subprocess.run([sys.executable, "-P", "-c", _PROGRAM], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise CannotMeasure(f"an empty engine process could not be measured: {said[-1]}")
    return int(done.stdout)
