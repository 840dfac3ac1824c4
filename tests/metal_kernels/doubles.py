# SPDX-License-Identifier: Apache-2.0
"""Compilers for `kernel.using` that replace Metal's."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest


@dataclass(frozen=True)
class Pipeline:
    """The key of MLX's compilations: a kernel's template, and the types of its buffers."""

    kernel: str
    template: tuple[tuple[str, Any], ...]
    inputs: tuple[tuple[mx.Dtype, bool], ...]  # dtype, and whether small enough to be constant
    outputs: tuple[mx.Dtype, ...]


@dataclass(eq=False)
class Recorder:
    """Compiles nothing: kernels return zeros and are recorded."""

    pipelines: set[Pipeline] = field(default_factory=set)
    threads: dict[str, int] = field(default_factory=dict)  # largest threadgroup by kernel

    def metal_kernel(self, name: str, **text: Any) -> Callable[..., list[mx.array]]:
        def call(**call: Any) -> list[mx.array]:
            self.pipelines.add(
                Pipeline(
                    name,
                    tuple(call["template"]),
                    tuple((array.dtype, array.size < 8) for array in call["inputs"]),
                    tuple(call["output_dtypes"]),
                )
            )
            self.threads[name] = max(self.threads.get(name, 0), math.prod(call["threadgroup"]))
            kinds = zip(call["output_shapes"], call["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in kinds]

        return call


class Digesting:
    """Makes kernels return digests that depend on each element of each input.

    Uses MLX's operations, so that it can be traced like Metal's kernels. For integers, including
    fences, it is exact.
    """

    def metal_kernel(self, name: str, **text: Any) -> Callable[..., list[mx.array]]:
        def call(**call: Any) -> list[mx.array]:
            whole, real = mx.array(len(name), mx.uint32), mx.array(0.0)
            for place, array in enumerate(call["inputs"]):
                weights = mx.arange(1, array.size + 1).astype(mx.uint32)
                if mx.issubdtype(array.dtype, mx.integer):
                    elements = array.reshape(-1).astype(mx.uint32)
                    whole = whole * 31 + place + (elements * weights).sum()
                else:
                    elements = mx.clip(array.reshape(-1).astype(mx.float32), -10, 10)
                    real = real + (elements * mx.cos(weights)).mean() * (place + 1)
            real = real + (whole % 1000) / 1000
            kinds = zip(call["output_shapes"], call["output_dtypes"], strict=True)
            return [self._spread(whole, real, shape, dtype) for shape, dtype in kinds]

        return call

    def _spread(self, whole: mx.array, real: mx.array, shape: Any, dtype: mx.Dtype) -> mx.array:
        ramp = mx.arange(math.prod(shape)).reshape(shape)
        if dtype == mx.uint32 and len(shape) > 1:  # not a fence, but the bits of states
            return mx.sin(real + ramp).astype(mx.float32).view(dtype)
        if mx.issubdtype(dtype, mx.integer):
            return (ramp + whole).astype(dtype)
        return mx.sin(real + ramp).astype(dtype)


class Refusing:
    """Pipelines that allow at most `most` threads per threadgroup.

    MLX detects violations at evaluation, so a call with more returns, and the next evaluation
    raises MLX's error. Unlike MLX, any evaluation raises it.
    """

    def __init__(self, compiler: Callable[..., Any], most: int) -> None:
        self._compiler, self._most = compiler, most
        self._refusal: str | None = None
        self.launched: set[tuple[str, int]] = set()  # kernels and the rows of their tiles

    def metal_kernel(self, name: str, **text: Any) -> Callable[..., list[mx.array]]:
        run = self._compiler(name=name, **text)

        def call(**call: Any) -> list[mx.array]:
            threads = math.prod(call["threadgroup"])
            if threads > self._most:
                self._refusal = (
                    f"Thread group size ({threads}) is greater than  the maximum allowed threads "
                    f"per threadgroup ({self._most})."
                )
                kinds = zip(call["output_shapes"], call["output_dtypes"], strict=True)
                return [mx.zeros(shape, dtype) for shape, dtype in kinds]
            template = dict(call["template"])
            rows = 8 * template.get("ROW_GROUPS", 0)
            self.launched.add((name, rows))
            return run(**call)

        return call

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Makes mx.eval and mx.async_eval raise rejected launches."""

        def raising(evaluate: Callable[..., None]) -> Callable[..., None]:
            def wrapped(*arrays: Any) -> None:
                refusal, self._refusal = self._refusal, None
                if refusal is not None:
                    raise ValueError(refusal)
                evaluate(*arrays)

            return wrapped

        with pytest.MonkeyPatch.context() as patch:
            for name in ("eval", "async_eval"):
                patch.setattr(mx, name, raising(getattr(mx, name)))
            yield
