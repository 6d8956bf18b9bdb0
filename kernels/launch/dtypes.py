"""The IR's dtypes as torch's and as Triton's."""

import torch

TORCH_DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
IR_DTYPES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
ITEM_BYTES: dict[str, int] = {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()}
_TRITON_SPELLS = {"f64": "fp64", "f32": "fp32", "f16": "fp16", "bool": "i1"}
TRITON_TYPES: dict[str, str] = {name: _TRITON_SPELLS.get(name, name) for name in TORCH_DTYPES}
