"""From what a user names (folder, hub id, GGUF file, configuration) to one description of the checkpoint."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from compilerllm.kernels.launch.errors import NotOnHub
from compilerllm.kernels.launch.files import GgufFile
from compilerllm.kernels.launch.hub import download
from compilerllm.kernels.launch.weights import SourceSpec
from compilerllm.models.errors import (
    CheckpointNotFound,
    InvalidCheckpoint,
    ModelError,
    UnknownArchitecture,
    first_line,
)
from compilerllm.models.gguf_config import gguf_config

LoadFormat = Literal["auto", "dummy", "config"]
_DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16,
}  # fmt: skip
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+\Z")


@dataclass(frozen=True, eq=False)
class ResolvedCheckpoint:
    """A checkpoint whose configuration is known and whose files have been found.

    kind: ``hf_dir``, ``gguf`` or ``config`` (no files: dummy weights). path: the folder or the GGUF file. config: a
    transformers configuration. dtype: what the model computes in. weights: where they are; a dummy one has its tensors
    filled in by capture. scheme: GGUF's architecture name. name: what to call the model.
    """

    kind: Literal["hf_dir", "gguf", "config"]
    name: str
    path: Path | None
    config: Any
    dtype: torch.dtype
    weights: SourceSpec
    scheme: str | None = None


def resolve(
    model: Any,
    *,
    dtype: str | torch.dtype = "auto",
    load_format: LoadFormat = "auto",
    revision: str | None = None,
) -> ResolvedCheckpoint:
    """Find a model and read its configuration; no weight is read.

    model: a folder with ``config.json``, a ``.gguf`` file, a hub id such as ``org/name``, or a transformers configuration
    (weights are then made up). load_format ``config``: weights are not looked for, and are those that checkpoints of such a
    configuration have. dtype ``auto``: the checkpoint's own. Raises ``ModelError`` naming what is missing.
    """
    if load_format not in ("auto", "dummy", "config"):
        raise ModelError(f"load_format is {load_format!r}; it must be auto, dummy or config")
    if hasattr(model, "to_dict") and hasattr(model, "model_type"):
        return ResolvedCheckpoint(
            "config", str(model.model_type), None, model, _dtype(dtype, model), SourceSpec("dummy")
        )
    text = os.fspath(model)
    path = Path(text).expanduser()
    if path.is_file():
        return _resolve_file(path, dtype, load_format)
    if not path.is_dir():
        path = _download(text, revision)
    if not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return _resolve_file(found[0], dtype, load_format)
        raise CheckpointNotFound(
            f"{path} has no config.json" + (f" but {len(found)} GGUF files; name one of them" if found else
            "; give a folder that a model was saved to, or a .gguf file")
        )  # fmt: skip
    config = _config(path)
    kinds = {"auto": "safetensors", "dummy": "dummy", "config": "expected"}
    spec = SourceSpec(kinds[load_format], str(path))
    if load_format != "dummy":
        _check_quantization(path, config)
    if load_format == "auto":
        spec.open()  # finds missing and truncated files now
    return ResolvedCheckpoint("hf_dir", text, path, config, _dtype(dtype, config), spec)


def _resolve_file(path: Path, dtype: str | torch.dtype, load_format: LoadFormat) -> ResolvedCheckpoint:
    if path.suffix == ".safetensors":
        raise CheckpointNotFound(
            f"{path} is a weight file alone; give the folder it is in, with its config.json"
        )
    file = GgufFile(path)
    config = gguf_config(file)
    spec = SourceSpec("dummy") if load_format == "dummy" else SourceSpec("gguf", str(path))
    scheme = str(file.metadata["general.architecture"])
    return ResolvedCheckpoint(
        "gguf", path.stem, path, config, _dtype(dtype, config, torch.bfloat16), spec, scheme
    )


def _dtype(asked: str | torch.dtype, config: Any, default: torch.dtype = torch.float32) -> torch.dtype:
    if isinstance(asked, torch.dtype):
        asked = str(asked).removeprefix("torch.")
    if asked == "auto":
        own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
        if isinstance(own, str):
            own = _DTYPES.get(own)
        return own if isinstance(own, torch.dtype) and own in _DTYPES.values() else default
    if asked not in _DTYPES:
        raise ModelError(f"dtype {asked!r} is unknown; choose auto, float32, bfloat16 or float16")
    return _DTYPES[asked]


def _config(folder: Path) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    file = folder / "config.json"
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except StrictDataclassError as error:
        reason = first_line(error.__cause__ or error)
        raise InvalidCheckpoint(
            f"{file} contradicts itself: {reason} Download it again, or mend it"
        ) from error
    except ValueError as error:
        if (
            "model type" in str(error)
            or "Unrecognized model" in str(error)
            or "trust_remote_code" in str(error)
        ):
            raise UnknownArchitecture(
                f"{file} names an architecture that the installed transformers does not have ({first_line(error)}); "
                "upgrade transformers, or use another model"
            ) from error
        raise InvalidCheckpoint(f"{file} cannot be used: {first_line(error)}") from error
    except ArithmeticError as error:  # such as a width divided by no heads
        raise InvalidCheckpoint(
            f"{file} contradicts itself: {first_line(error)}. Download it again, or mend it"
        ) from error
    except (OSError, TypeError, KeyError, AttributeError) as error:
        raise InvalidCheckpoint(f"{file} cannot be read: {first_line(error)}; download it again") from error


def _check_quantization(folder: Path, config: Any) -> None:
    found = getattr(config, "quantization_config", None)
    if found:
        method = (
            found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
        )
        raise InvalidCheckpoint(
            f"{folder} is quantised by {method or 'an unknown method'}, which cannot be loaded yet; use the bfloat16 "
            "checkpoint, or a GGUF file"
        )


def _download(name: str, revision: str | None) -> Path:
    """A hub model's folder in the local cache, downloaded where it is not there yet."""
    if not _HUB_ID.match(name):
        raise CheckpointNotFound(f"{name} is no folder, no file and no hub id (org/name); check the path")
    try:
        return download(name, revision)
    except NotOnHub as error:
        raise CheckpointNotFound(str(error)) from error
