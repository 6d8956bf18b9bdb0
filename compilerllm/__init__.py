"""compilerllm: a compiler-centric inference and serving engine for large language models.

The two names most programs need are loaded on first use, so that ``import compilerllm`` costs nothing:

>>> from compilerllm import LLM, SamplingParams
"""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compilerllm.llm import LLM
    from compilerllm.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def _forget_checkout_root() -> None:
    """Drop a checkout's root from ``sys.path``.

    ``python -m compilerllm...`` run in a checkout puts the root there, and the folder ``kernels/`` would then
    hide PyPI's ``kernels`` from transformers. Our own packages are found through the install's mapping.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.path.isdir(os.path.join(root, "kernels")) and os.path.isdir(os.path.join(root, "ir")):
        sys.path[:] = [p for p in sys.path if os.path.abspath(p or os.getcwd()) != root]


_forget_checkout_root()


def __getattr__(name: str) -> object:
    if name == "LLM":
        from compilerllm.llm import LLM

        return LLM
    if name == "SamplingParams":
        from compilerllm.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
