"""GGUF tensors under a transformers model's names, with what llama.cpp's converter did to them undone.

The names come from the ``gguf`` package's tables; what was done to the weights is listed here per architecture.
"""

import re
from collections.abc import Mapping
from typing import Any

from compilerllm.ir.recipe import Concat, Permute, Read, Recipe, Reshape, Shift
from compilerllm.ir.types import TensorType
from compilerllm.kernels.launch.weights import WeightSource
from compilerllm.models.errors import UnknownArchitecture

# llama.cpp rotates adjacent columns where transformers rotates halves, and stores q and k with rows reordered for it.
_REORDERED_HEADS = frozenset({"llama"})
# Norms whose weight transformers adds 1 to: the file has the sum.
_NORM_PLUS_ONE = frozenset({"gemma", "gemma2", "gemma3", "nemotron"})
# Conv1D weights, [K, N] in transformers, [N, K] in the file.
_TRANSPOSED = {"gpt2": re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")}
_MERGED_EXPERTS = re.compile(r"^(.*\.experts)\.gate_up_proj$")


def gguf_table(
    architecture: str, config: Any, types: Mapping[str, TensorType], source: WeightSource
) -> dict[str, Recipe]:
    """Recipes over the file's tensors, by the model's names; what the file lacks is left out.

    architecture: the file's ``general.architecture``. types: the model's parameters.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next((k for k, v in MODEL_ARCH_NAMES.items() if v == architecture), None)
    if kind is None:
        raise UnknownArchitecture(
            f"GGUF architecture {architecture!r} is unknown to the installed gguf; upgrade the package"
        )
    names = get_tensor_name_map(kind, int(config.num_hidden_layers))
    stored = set(source.names())

    def find(name: str) -> str | None:
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        return found if found in stored else None

    table: dict[str, Recipe] = {}
    for name, wanted in types.items():
        merged = _MERGED_EXPERTS.match(name)
        if merged:
            parts = [
                find(f"{merged[1]}.{p}_proj.weight") or find(f"{merged[1]}.{p}_proj") for p in ("gate", "up")
            ]
            parts = [
                p or _expert_part(name, kind, stored) for p, kind in zip(parts, ("gate", "up"), strict=True)
            ]
            if all(parts):
                table[name] = Concat(tuple(Read(str(p)) for p in parts), 1)
            continue
        found = find(name) or find(name + ".weight")
        if found is None and name.endswith("experts.down_proj"):
            found = _expert_part(name, "down", stored)
        if found is not None:
            table[name] = _undone(architecture, config, name, wanted, Read(found))
    return table


def _expert_part(name: str, kind: str, stored: set[str]) -> str | None:
    layer = re.search(r"\.(\d+)\.", name)
    found = f"blk.{layer[1]}.ffn_{kind}_exps.weight" if layer else ""
    return found if found in stored else None


def _undone(architecture: str, config: Any, name: str, wanted: TensorType, read: Read) -> Recipe:
    part = re.search(r"\.(q|k)_proj\.(weight|bias)$", name)
    if architecture in _REORDERED_HEADS and part:
        heads = config.num_attention_heads if part[1] == "q" else config.num_key_value_heads
        shape = tuple(int(d) for d in wanted.shape)
        split = (int(heads), shape[0] // int(heads) // 2, 2, *shape[1:])
        return Reshape(Permute(Reshape(read, split), (0, 2, 1, *range(3, len(split)))), shape)
    if architecture in _NORM_PLUS_ONE and name.endswith("norm.weight"):
        return Shift(read, -1.0)
    if architecture in _TRANSPOSED and _TRANSPOSED[architecture].search(name):
        return Permute(read, (1, 0))
    return read
