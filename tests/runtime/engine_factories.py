"""What the tests' engine processes load. ``config.model.model`` is a query string that says how it behaves."""

import os
import time
from pathlib import Path
from urllib.parse import parse_qsl

from fake_model import PAGED, FakeModel  # by this folder on PYTHONPATH: the child knows no package `tests`

from compilerllm.config import EngineConfig
from compilerllm.errors import CompilerLLMError
from compilerllm.ir.step import Executable
from compilerllm.runtime.messages import ModelFacts


class Unloadable(CompilerLLMError):
    """A mistake of the user's, as loading reports them."""


def load(config: EngineConfig) -> tuple[Executable, ModelFacts]:
    """The fake model. ``delay``: seconds a step; ``exit``, ``user_error``, ``bug``: how loading ends.

    With ``mark=FILE`` the latter three happen only if FILE exists, and it is made by the first load.
    """
    options = dict(parse_qsl(config.model.model))
    print("loading: this line must not reach the parent's standard output")
    mark = Path(options["mark"]) if "mark" in options else None
    if mark is None or mark.exists():
        if "exit" in options:
            os._exit(int(options["exit"]))
        if "user_error" in options:
            raise Unloadable(options["user_error"])
        if "bug" in options:
            raise ArithmeticError(options["bug"])
    if mark is not None:
        mark.touch()
    time.sleep(float(options.get("load", 0)))
    model = FakeModel(PAGED, 400, delay=float(options.get("delay", 0)))
    return model, ModelFacts(model="fake", target="numpy", card={"model": "fake"})
