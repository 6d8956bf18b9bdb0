"""Chooses weight layouts for a CPU target: edits recipes only, the graph's meaning stays.

A linear's weight is packed for its kernel; a table that is also a linear's weight (tied embeddings) is read from the
packed form, so it is stored once. A quantised table that no linear reads is packed too: rows of blocks have no other form.
"""

from dataclasses import replace

from compilerllm.ir.graph import Graph, Module, Param
from compilerllm.ir.recipe import Recipe, Relayout
from compilerllm.ir.types import TensorType
from compilerllm.kernels.cpu.target import CpuTarget
from compilerllm.kernels.errors import UnsupportedByTarget

LINEAR_OPS = {"linear": "", "linear_act": "", "linear_add": "", "linear_gated": "_gu16"}
TAGS = {"n16k2": "Bf16W", "n16": "F32W", "q4_1_n16": "Q4_1W", "q4_0_n16": "Q4_0W", "q8_0_n16": "Q8_0W"}


def base_layout(type: TensorType, target: CpuTarget) -> str:
    """The packed layout of a weight. Raises ``UnsupportedByTarget`` for a dtype without one."""
    if type.is_quantized:
        return f"{type.dtype}_n16"
    match type.dtype:
        case "bf16":
            return target.bf16_weights
        case "f32":
            return target.f32_weights
    raise UnsupportedByTarget(
        f"{target.name} has no linear for {type.dtype} weights; use --dtype bfloat16 or float32"
    )


def weight_tag(recipe: Recipe, default: str | None = None) -> str:
    """The template tag of a packed weight's layout."""
    if not isinstance(recipe, Relayout):
        if default is not None:
            return default
        raise UnsupportedByTarget(f"weight {recipe} was not packed")
    return TAGS[recipe.layout.removesuffix("_gu16").removesuffix("_experts")]


def gated_panels(rows: int) -> bool:
    """Whether gate and up rows [2F] can be packed as alternating panels of 16."""
    return rows % 32 == 0


def select_layouts(module: Module, target: CpuTarget) -> Module:
    """Add a Relayout to the recipe of every weight that a linear or experts node reads."""
    packed_in_main: dict[Recipe, Recipe] = {}
    functions = [_select(graph, target, packed_in_main) for graph in module.functions.values()]
    return module.with_functions(*functions)


def _select(graph: Graph, target: CpuTarget, packed: dict[Recipe, Recipe]) -> Graph:
    layouts: dict[str, str] = {}
    for node in graph.nodes:
        if node.op in LINEAR_OPS:
            weight, suffix = node.inputs[1], LINEAR_OPS[node.op]
            assert weight is not None
            suffix = suffix if gated_panels(int(weight.shape[0])) else ""
            layout = base_layout(weight.tensor, target) + suffix
            bias = node.input(2)
            if suffix and bias is not None:
                layouts[bias.name] = suffix.removeprefix("_")
            if layouts.setdefault(weight.name, layout) != layout:
                raise UnsupportedByTarget(
                    f"@{graph.name}: %{weight.name} is read in two layouts, {layouts[weight.name]} and {layout}"
                )
        elif node.op == "experts":
            gate_up, down = node.inputs[3], node.inputs[4]
            assert gate_up is not None and down is not None
            layouts[gate_up.name] = base_layout(gate_up.tensor, target) + "_experts"
            layouts[down.name] = base_layout(down.tensor, target) + "_experts"
    params: list[Param] = []
    for param in graph.params:
        layout_name = layouts.get(param.name)
        if layout_name is not None and not isinstance(param.recipe, Relayout):
            packed_recipe = Relayout(param.recipe, layout_name)
            packed[param.recipe] = packed_recipe
            params.append(replace(param, recipe=packed_recipe))
        else:
            params.append(param)
    tables = {n.operand(1).name for n in graph.nodes if n.op == "embedding"} - layouts.keys()
    params = [_table(p, target, packed) if p.name in tables else p for p in params]
    return replace(graph, params=tuple(params))


def _table(param: Param, target: CpuTarget, packed: dict[Recipe, Recipe]) -> Param:
    """An embedding's table: the same bytes as the head's, already packed for it; else packed if it is quantised."""
    tensor = param.value.tensor
    if param.recipe in packed:
        return replace(param, recipe=packed[param.recipe])
    if tensor.is_quantized and not isinstance(param.recipe, Relayout):
        return replace(param, recipe=Relayout(param.recipe, base_layout(tensor, target)))
    return param
