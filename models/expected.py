"""The tensors that checkpoints of a model have, from its configuration alone: for a build with no weights at hand."""

from collections.abc import Mapping
from typing import Any

import torch

from compilerllm.ir.types import TensorType
from compilerllm.kernels.launch.dtypes import IR_DTYPES, TORCH_DTYPES
from compilerllm.models.errors import CaptureError, first_line


def expected_tensors(
    skeleton: Any, types: Mapping[str, TensorType], tied: Mapping[str, str]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """IR dtype and shape by raw name, as ``save_pretrained`` would write them: transformers' conversions run backwards.

    skeleton: the model on the meta device. Tied tensors are stored once. Raises ``CaptureError``.
    """
    from transformers.core_model_loading import revert_weight_conversion

    left_out = {*tied, *(skeleton._keys_to_ignore_on_save or ())}
    state = {
        name: torch.empty([int(d) for d in t.shape], dtype=TORCH_DTYPES[t.dtype], device="meta")
        for name, t in types.items()
        if name not in left_out
    }
    try:
        stored = revert_weight_conversion(skeleton, state)
    except Exception as error:  # whatever a conversion that has no way back raises
        raise CaptureError(
            f"transformers cannot say which tensors a {skeleton.config.model_type} checkpoint has ({first_line(error)}); build "
            "from the checkpoint itself, without --from-config"
        ) from error
    return {name: (IR_DTYPES[t.dtype], tuple(t.shape)) for name, t in stored.items()}
