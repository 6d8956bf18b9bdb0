"""Capture: a transformers model, as it is, to a Module; no weight is allocated.

The model is built on the meta device at full depth to see its layer kinds, cut down to one layer of each, its norms,
rotary functions, attention and experts replaced by single operators, exported under fake tensors with the number of
tokens dynamic, functionalised, lowered and stitched to full depth.
"""

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compilerllm.ir.dims import symbol
from compilerllm.ir.graph import DimDecl, Module
from compilerllm.ir.recipe import Read
from compilerllm.ir.types import TensorType
from compilerllm.kernels.launch.dtypes import IR_DTYPES
from compilerllm.models import interfaces
from compilerllm.models.errors import CaptureError, ModelError, UnknownArchitecture, first_line
from compilerllm.models.kinds import LayerPlan, one_of_each, plan_layers, restore_buffers
from compilerllm.models.lower import Source
from compilerllm.models.opset import ops
from compilerllm.models.shapes import Shapes, bounds
from compilerllm.models.stitch import stitch
from compilerllm.models.swaps import Swaps, swapped
from compilerllm.models.tasks import AUTO_CLASSES, WANTS, Task, check_head, has_token_types, wrapper

_TRACED_TOKENS = 11


@dataclass(frozen=True)
class Captured:
    """A captured model.

    module: ``main(%input_ids: i64[1, T], %positions: i64[1, T])`` to logits ``[1, T, V]``, one function per layer kind; for
    the other tasks to hidden states or labels, from ``%token_types`` too where the model has them.
    types: dtype and shape of every parameter of the full model, by its name in the model's state dict. tied: names that
    are another parameter, by that parameter's name. skeleton: the model on the meta device.
    """

    module: Module
    plan: LayerPlan
    swaps: Swaps
    opaque: Mapping[str, int]
    types: Mapping[str, TensorType]
    tied: Mapping[str, str]
    skeleton: Any


def build_skeleton(config: Any, dtype: torch.dtype, task: Task = "generate") -> Any:
    """The model on the meta device. Raises ``UnknownArchitecture`` or ``CaptureError`` where transformers cannot."""
    import transformers

    auto = getattr(transformers, AUTO_CLASSES[task])
    interfaces.register()
    config = copy.deepcopy(config)
    # Built as eager: some classes look their attention up by name while they are made, and know none but theirs.
    for part in (config, config.get_text_config()):
        part._attn_implementation_internal = part._experts_implementation_internal = "eager"
    try:
        with torch.device("meta"), _quiet():
            model: Any = auto.from_config(config, dtype=dtype)
    except Exception as error:  # whatever its constructor raises
        if type(config) in auto._model_mapping:
            raise CaptureError(
                f"transformers cannot build this {config.model_type} model from its configuration: {first_line(error)}"
            ) from error
        raise UnknownArchitecture(
            f"{config.model_type!r} ({type(config).__name__}) has no {WANTS[task]} in the installed transformers; "
            "upgrade transformers, or choose a decoder-only model"
        ) from error
    if task == "classify":
        check_head(model)
    for part in (model.config, model.config.get_text_config()):
        part._attn_implementation_internal = part._experts_implementation_internal = interfaces.NAME
    return model.eval()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what transformers and torch say about arguments of ours (they log it for their own callers)."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def parameter_types(model: nn.Module) -> tuple[dict[str, TensorType], dict[str, str]]:
    """Types of all stored tensors by name, and which names are other tensors' (tied weights)."""
    types: dict[str, TensorType] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    persistent = set(model.state_dict(keep_vars=True))
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if name not in persistent:
            continue
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
        types[name] = TensorType(IR_DTYPES[tensor.dtype], tuple(tensor.shape))
    return types, tied


def capture(
    config: Any, dtype: torch.dtype, *, packed: Mapping[str, str] | None = None, skeleton: Any = None,
    task: Task = "generate",
) -> Captured:  # fmt: skip
    """Capture a model of a transformers configuration, by default its causal language model.

    packed: IR dtypes (``q4_1`` ...) of the parameters that stay packed, by global name. skeleton: the result of
    ``build_skeleton`` for the same configuration, if there is one already; it is used up. Raises ``ModelError``.
    """
    packed = packed or {}
    model = skeleton if skeleton is not None else build_skeleton(config, dtype, task)
    text_config = model.config.get_text_config()
    types, tied = parameter_types(model)
    plan = plan_layers(model, text_config, packed)
    unknown = restore_buffers(model)
    with one_of_each(model, text_config, plan) as layers, swapped(model) as count:
        constants = dict(model.named_buffers(remove_duplicate=False))
        exported, names = _export(model, layers, text_config, task)
        swaps = count()
    graph, shapes, dims, inputs, sources = _sources(exported, names, constants, unknown, packed, plan, tied)
    module, opaque = stitch(graph, plan, inputs, sources, shapes, dims)
    return Captured(module, plan, swaps, opaque, types, tied, model)


def _mark(layer: nn.Module, index: int) -> None:
    """Let a layer's forward say where it begins and ends."""
    original = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (ops.enter(args[0], index), *args[1:])
        else:
            kwargs["hidden_states"] = ops.enter(kwargs["hidden_states"], index)
        result = original(*args, **kwargs)
        if isinstance(result, tuple):
            return (ops.leave(result[0], index), *result[1:])
        return ops.leave(result, index)

    layer.forward = forward


def _export(model: Any, layers: nn.ModuleList, config: Any, task: Task) -> tuple[Any, dict[str, str]]:
    """The exported program, functionalised. Parameters become fake tensors, one each (tied ones apart)."""
    for index, layer in enumerate(layers):
        _mark(layer, index)
    with FakeTensorMode(shape_env=ShapeEnv()):
        for module in model.modules():
            for key, parameter in list(module._parameters.items()):
                if parameter is not None:
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                    module._parameters[key] = nn.Parameter(fake, requires_grad=False)
            for key, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype)
        inputs = ["input_ids", "positions"]
        if task != "generate" and has_token_types(model):
            inputs.append("token_types")
        given = tuple(torch.zeros(1, _TRACED_TOKENS, dtype=torch.long) for _ in inputs)
    limit = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    tokens = torch.export.Dim("T", min=2, max=max(limit, _TRACED_TOKENS + 1))
    try:
        with torch.no_grad(), _quiet():
            exported = torch.export.export(
                wrapper(model, task), given, dynamic_shapes={name: {1: tokens} for name in inputs},
                strict=False, prefer_deferred_runtime_asserts_over_guards=True,
            ).run_decompositions({})  # fmt: skip
    except ModelError:
        raise
    except Exception as error:  # whatever the model's code or the tracer raises
        raise CaptureError(f"{type(model).__name__} cannot be traced: {first_line(error)}") from error
    signature = exported.graph_signature
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    return exported, {k: v.removeprefix("model_.") for k, v in names.items()}


def _sources(
    exported: Any, names: Mapping[str, str], constants: Mapping[str, Tensor], unknown: set[str], packed: Mapping[str, str],
    plan: LayerPlan, tied: Mapping[str, str],
) -> tuple[fx.Graph, Shapes, list[DimDecl], dict[fx.Node, str], dict[fx.Node, Source]]:  # fmt: skip
    signature = exported.graph_signature
    graph: fx.Graph = exported.graph_module.graph
    lifted = {
        name: exported.constants[target]
        for name, target in signature.inputs_to_lifted_tensor_constants.items()
    }
    loose = {f"model_.{n}" for n in constants} & set(getattr(signature, "non_persistent_buffers", ()))
    inputs: dict[fx.Node, str] = {}
    sources: dict[fx.Node, Source] = {}
    env: Any = None
    torch_symbol = ""
    for node in graph.find_nodes(op="placeholder"):
        if node.name in signature.user_inputs:
            inputs[node] = node.name
            size = node.meta["val"].shape[1]
            if not isinstance(size, torch.SymInt):
                raise CaptureError(
                    "the number of tokens became a constant in the trace; the model cannot run at other lengths"
                )
            env, torch_symbol = size.node.shape_env, size.node.expr.name
            continue
        name = names[node.name]
        constant = lifted.get(node.name)
        if f"model_.{name}" in loose:
            constant = constants[name]
            if name in unknown and node.users:
                raise CaptureError(
                    f"buffer {name} is in no checkpoint and its value cannot be computed from the configuration"
                )
        original = _original_name(name, plan)
        sources[node] = Source(name, Read(tied.get(original, name)), packed.get(original), constant)
    _, high = bounds(env, torch_symbol)
    return graph, Shapes({torch_symbol: symbol("T").name}), [DimDecl("T", 0, high)], inputs, sources


def _original_name(name: str, plan: LayerPlan) -> str:
    """A parameter's name in the full model, for one of the cut-down model's."""
    prefix = plan.path + "."
    if not name.startswith(prefix):
        return name
    position, _, rest = name[len(prefix) :].partition(".")
    return f"{prefix}{plan.representatives[int(position)]}.{rest}"
