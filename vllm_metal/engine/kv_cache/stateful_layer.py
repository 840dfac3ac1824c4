# SPDX-License-Identifier: Apache-2.0
"""Interface of layers with state between steps: their vLLM spec, storage, caches and costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from vllm_metal.engine.kv_cache.layer_cache import KVBackend
from vllm_metal.engine.kv_cache.layer_state import LayerState, StepScope, Storage

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from metal_kernels.selfcheck import Case
    from vllm_metal.patches.mlx_patches.library_kernels import Call


@dataclass(frozen=True)
class StatefulLayer(ABC):
    """A model's layer that has state between steps: K/V or a recurrent state."""

    #: "layers.N", as in vLLM's KV cache groups; "layers.N.M" for a layer with several caches.
    name: str

    @property
    def is_auxiliary(self) -> bool:
        """Whether the layer uses block ids of other layers, with memory of its own; see `specs`."""
        return False

    @property
    def place(self) -> str:
        """The name without the index of the cache: "layers.N" for "layers.N.M"."""
        head, _, rest = self.name.rpartition("layers.")
        return f"{head}layers.{rest.partition('.')[0]}"

    @property
    @abstractmethod
    def kind(self) -> Hashable:
        """All properties but the name; layers of one kind and KV cache group share plans."""

    @property
    @abstractmethod
    def storage_key(self) -> Hashable:
        """Equal for layers that can share a storage in the same pool."""

    @property
    @abstractmethod
    def context(self) -> Hashable:
        """The part of the context that is kept; layers that differ go into different groups."""

    @abstractmethod
    def spec(self, block_size: int, elements: mx.Dtype, whole_context: bool = False) -> KVCacheSpec:
        """Returns the layer's spec for vLLM's scheduler.

        Args:
            elements: dtype of K and V in the pool: the model's, or uint8 or int8 if quantized.
            whole_context: ignore sliding windows, so that all attention layers form one group.
        """

    @abstractmethod
    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        elements: mx.Dtype,
        backend: KVBackend,
    ) -> LayerState:
        """Allocates the storage, all zeros."""

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's recurrent state; 0 for layers that keep K/V.

        A state is stored in the storage of a K/V layer if the pool has one (`share`).
        """
        return 0

    def share(self, storage: Storage, part: int = 0) -> LayerState:
        """Returns this layer's state in `storage`, which belongs to another layer.

        That layer has enough `room` for a recurrent state, or is a `pack` of such layers, of which
        this one is number `part`.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps no state that shares a storage")

    def pack(self, count: int) -> StatefulLayer:
        """Returns a layer of the same name with the K/V heads of `count` such layers."""
        raise NotImplementedError(f"{type(self).__name__} has no K/V heads to pack")

    def room(self, block_size: int, elements: mx.Dtype) -> int:
        """Bytes that a block of this layer has for another layer's state; see `spec`."""
        return 0

    @abstractmethod
    def scope(self, state: LayerState) -> StepScope:
        """Creates the scope that layers of this kind share; `state` belongs to any of these."""

    @abstractmethod
    def cache(self, state: LayerState, scope: StepScope) -> Any:
        """Returns the object to pass to the model as mlx-lm's cache of this layer."""

    def unsupported(self, dtype: mx.Dtype, block_size: int) -> str | None:
        """Returns why our kernels cannot serve the layer; None if they can, or it uses no kernels.

        `dtype` is that of the model's queries.
        """
        return None

    def cases(
        self,
        dtype: mx.Dtype,
        elements: mx.Dtype,
        block_size: int,
        host: StatefulLayer | None = None,
    ) -> list[Case]:
        """Returns self-check cases for the kernels that the layer uses.

        `host` is the layer whose storage holds recurrent states, if there is one.
        """
        return []

    @property
    def library_calls(self) -> tuple[Call, ...]:
        """mlx-lm's own kernels that this layer launches on a GPU."""
        return ()

    def trials(
        self,
        dtype: mx.Dtype,
        elements: mx.Dtype,
        block_size: int,
        backend: KVBackend,
        host: StatefulLayer | None = None,
    ) -> Iterable[tuple[Hashable, Callable[[], mx.array]]]:
        """Yields (key, launch): small launches that together compile all kernels of the layer.

        Launches with the same key compile the same kernels. `host` is the layer whose storage holds
        recurrent states, if there is one.
        """
        return ()

    def gathers(self, backend: KVBackend) -> bool:
        """Whether a step's memory, without the pool, grows with the context; see `profile`."""
        return False

    def profile(
        self,
        context: int,
        bounds: StepBounds,
        dtype: mx.Dtype,
        elements: mx.Dtype,
        backend: KVBackend,
    ) -> None:
        """Runs the layer's largest calls within `bounds`, to measure MLX's peak memory.

        `context` is a request's number of tokens, `dtype` that of queries, `elements` the pool's.
        """
        return


@dataclass(frozen=True)
class StepBounds:
    """The most tokens and requests of a step, and the tokens per block."""

    num_tokens: int
    max_num_seqs: int
    block_size: int
