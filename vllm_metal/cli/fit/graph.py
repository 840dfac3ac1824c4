# SPDX-License-Identifier: Apache-2.0
"""Records the operations of a computation without running any."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from metal_kernels import kernel
from vllm_metal.patches.mlx_patches.replacing import replaced

# `mx.export_function` shows operations with shapes and dtypes. But it decomposes compiled
# functions, and cannot show our kernels and operations that only Metal has. Each of these is
# recorded as one *opaque* operation instead: `mx.depends` of new zeros on whatever the operation
# reads. Values that are computed twice from the same arrays are recorded once.

#: Operations of mlx.core.fast that are one operation on Metal and several on the CPU backend. All
#: return an array like their first input.
_FAST = ("rms_norm", "layer_norm", "rope", "scaled_dot_product_attention")
#: Operations that `mx.export_function` does not support.
_UNKNOWN = ("from_fp8", "to_fp8", "contiguous")
_COMPILED = type(nn.silu)  # the type of mx.compile's results


@dataclass(frozen=True)
class Operation:
    """One node of a graph. Arrays are referenced by name."""

    kind: str  # MLX's name of its primitive
    arguments: tuple[Any, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    opaque: bool = False


@dataclass(frozen=True)
class Graph:
    """A recorded graph: its operations, and the arrays that they read and write."""

    operations: tuple[Operation, ...]
    arrays: dict[str, tuple[tuple[int, ...], mx.Dtype]]  # shape and dtype by name
    inputs: tuple[str, ...]  # names of the recorded function's inputs, in order
    constants: tuple[str, ...]  # arrays that exist already
    outputs: tuple[str, ...]  # names of its outputs


def record(build: Callable[..., Sequence[mx.array]], inputs: Sequence[mx.array]) -> Graph:
    """Records the graph of what `build` returns, without computing it or `inputs`.

    Args:
        build: takes an array for each of `inputs` and returns lazy arrays.
        inputs: arrays of which only shapes and dtypes matter.

    Raises:
        ValueError: the computation uses an operation that MLX cannot export.
    """
    seen: list[dict[str, Any]] = []
    try:
        mx.export_function(seen.append, build, *inputs)
    except ValueError as error:
        if "export_function" not in str(error):
            raise
        raise ValueError(
            f"the memory of a step of this model cannot be estimated: {error}"
        ) from error
    parts = {entry["type"]: entry for entry in seen if entry["type"] != "primitive"}
    arrays: dict[str, tuple[tuple[int, ...], mx.Dtype]] = {}
    operations: list[Operation] = []
    known: set[str] = set()
    for entry in (parts["inputs"]["inputs"], parts["outputs"]["outputs"]):
        arrays |= {name: (tuple(shape), dtype) for name, shape, dtype in entry}
    for name, array in parts["constants"]["constants"]:
        arrays[name] = (array.shape, array.dtype)
    for entry in seen:
        if entry["type"] != "primitive":
            continue
        arrays |= {name: (tuple(shape), dtype) for name, shape, dtype in entry["outputs"]}
        names = tuple(name for name, *_ in entry["outputs"])
        if not known.issuperset(names):  # an operation has an entry per output
            known.update(names)
            reads = tuple(name for name, *_ in entry["inputs"])
            operations.append(Operation(entry["name"], tuple(entry["arguments"]), reads, names))
    return Graph(
        tuple(_mark_opaque(operations)),
        arrays,
        tuple(name for name, *_ in parts["inputs"]["inputs"]),
        tuple(name for name, _ in parts["constants"]["constants"]),
        tuple(name for name, *_ in parts["outputs"]["outputs"]),
    )


def record_with_weights(
    model: nn.Module,
    build: Callable[..., Sequence[mx.array]],
    others: Sequence[mx.array] = (),
) -> tuple[Graph, tuple[str, ...]]:
    """Records the graph of what `build` computes with a model, whose weights become inputs.

    `others` are further inputs, of which only shapes and dtypes matter. The model's weights may be
    lazy, and are restored afterwards. Returns the graph and the names of the weights in it. Raises
    ValueError as `record`.
    """
    names, weights = zip(*tree_flatten(model.parameters()), strict=True)

    def whole(*inputs: mx.array) -> Sequence[mx.array]:
        model.update(tree_unflatten(list(zip(names, inputs, strict=False))))
        return build(*inputs[len(names) :])

    try:
        graph = record(whole, [*weights, *others])
    finally:
        model.update(tree_unflatten(list(zip(names, weights, strict=True))))
    return graph, graph.inputs[: len(names)]


@contextmanager
def recordable(metal: bool) -> Iterator[None]:
    """Makes unexportable operations opaque; with `metal`, also those that only Metal has."""
    device = mx.default_device()
    with ExitStack() as stack:
        mx.set_default_device(mx.Device(mx.cpu))
        stack.callback(mx.set_default_device, device)
        for name, module in list(sys.modules.items()):
            if name.startswith(("mlx.", "mlx_lm.", "mlx_vlm.")):
                for attribute, value in list(vars(module).items()):
                    if type(value) is _COMPILED:
                        stack.enter_context(replaced(module, attribute, _whole(value)))
        for attribute in _UNKNOWN:
            stack.enter_context(replaced(mx, attribute, _whole(getattr(mx, attribute))))
        if metal:
            stack.enter_context(kernel.using(lambda **_: _launch))
            for attribute in _FAST:
                function = getattr(mx.fast, attribute)
                stack.enter_context(replaced(mx.fast, attribute, _like_first(function)))
        yield


def _mark_opaque(operations: Sequence[Operation]) -> Iterator[Operation]:
    """Marks the operations made by `_opaque` as opaque, and drops the zeros that they read."""
    zeros = {
        name for operation in operations if operation.kind == "Full" for name in operation.outputs
    }
    for operation in operations:
        count = len(operation.outputs)
        if operation.kind == "Depends" and zeros.issuperset(operation.inputs[:count]):
            yield Operation("Opaque", (), operation.inputs[count:], operation.outputs, opaque=True)
        else:
            yield operation


def _opaque(outputs: Sequence[tuple[Sequence[int], mx.Dtype]], reads: Sequence[Any]) -> Any:
    """Returns arrays of these shapes and dtypes, from one operation that reads `reads`."""
    new = [mx.zeros(shape, dtype) for shape, dtype in outputs]
    return mx.depends(new, [array for array in reads if isinstance(array, mx.array)])


def _whole(function: Any) -> Callable[..., Any]:
    @wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        reads = [read for _, read in cast(list[tuple[str, Any]], tree_flatten([args, kwargs]))]
        like = cast(list[tuple[str, mx.array]], tree_flatten([out]))
        arrays = iter(_opaque([(array.shape, array.dtype) for _, array in like], reads))
        return tree_map(lambda _: next(arrays), out)

    return call


def _like_first(function: Any) -> Callable[..., mx.array]:
    @wraps(function, updated=())
    def call(x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        (out,) = _opaque([(x.shape, x.dtype)], [x, *args, *kwargs.values()])
        return out

    return call


def _launch(
    inputs: Sequence[Any],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    **_: Any,
) -> list[mx.array]:
    # Replaces each kernel of `mx.fast.metal_kernel`. Inputs are passed twice, because MLX reuses
    # the memory of an input only if it is read once, and kernels never reuse memory.
    outputs = list(zip(output_shapes, output_dtypes, strict=True))
    return list(_opaque(outputs, [*inputs, *inputs]))
