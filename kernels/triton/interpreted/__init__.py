"""The templates once more, decorated while Triton interprets: kernels that run on a CPU, for tests and references."""

from pathlib import Path

__path__ = [str(Path(__file__).parent.parent / "templates")]
