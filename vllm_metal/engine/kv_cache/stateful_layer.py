# SPDX-License-Identifier: Apache-2.0
"""The protocol of a layer that keeps something between steps, as it was read off a model.

A `StatefulLayer` names the layer's vLLM spec, makes its storage, and says what the layer costs.
"""

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
    """A layer that keeps something between steps, as it was read off a model."""

    #: "layers.N", as vLLM's KV cache groups list it; "layers.N.M" of a layer with several caches.
    name: str

    @property
    def guest(self) -> bool:
        """Whether the layer lies in blocks of those that keep the whole context, in memory of its
        own; see `specs.kv_cache_specs`."""
        return False

    @property
    def place(self) -> str:
        """The name without the number of the cache: what layers of one tuple of caches share."""
        head, _, rest = self.name.rpartition("layers.")
        return f"{head}layers.{rest.partition('.')[0]}"

    @property
    @abstractmethod
    def kind(self) -> Hashable:
        """All but the name that tells layers apart: layers of one kind and group share plans."""

    @property
    @abstractmethod
    def storage_key(self) -> Hashable:
        """What layers must have in common to share a storage, for any one pool."""

    @property
    @abstractmethod
    def context(self) -> Hashable:
        """What of its context a layer keeps; vLLM puts layers that differ into several groups."""

    @abstractmethod
    def spec(self, block_size: int, elements: mx.Dtype, whole_context: bool = False) -> KVCacheSpec:
        """The layer as vLLM's scheduler sees it.

        Args:
            block_size: tokens of a block.
            elements: dtype of K and V in the pool: the model's, or uint8 or int8 for codes.
            whole_context: keep all of it, so that layers with different windows form one group;
                a layer that has no such form gives its own.
        """

    @abstractmethod
    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        elements: mx.Dtype,
        backend: KVBackend,
    ) -> LayerState:
        """The storage, of zeros; only layers of K/V make it a `backend`."""

    @property
    def state_bytes(self) -> int:
        """Bytes that the layer keeps of a request, however long; 0: it keeps rows of every token.

        A state lies in the storage of such rows where the pool has any (`share`).
        """
        return 0

    def share(self, storage: Storage) -> LayerState:
        """What the layer keeps, in a storage whose layer has `room` for `state_bytes`."""
        raise NotImplementedError(f"{type(self).__name__} keeps no state that shares a storage")

    def room(self, block_size: int, elements: mx.Dtype) -> int:
        """Bytes that a block of the layer has for a state of another layer; see `spec`."""
        return 0

    @abstractmethod
    def scope(self, state: LayerState) -> StepScope:
        """Makes what the layers of this kind share of a step.

        Args:
            state: storage of one of the kind's layers, which stands for all.
        """

    @abstractmethod
    def cache(self, state: LayerState, scope: StepScope) -> Any:
        """Stands where the model expects mlx-lm's cache of this layer, for one network."""

    def unsupported(self, dtype: mx.Dtype, block_size: int) -> str | None:
        """Why our kernels cannot serve the layer; None where they can, or are not asked to.

        Args:
            dtype: of the model's queries.
            block_size: of the pool.
        """
        return None

    def cases(
        self,
        dtype: mx.Dtype,
        elements: mx.Dtype,
        block_size: int,
        host: StatefulLayer | None = None,
    ) -> list[Case]:
        """What the layer asks of our kernels, to be checked before it is served by them.

        `host` is the layer in whose storage states lie, if there is one.
        """
        return []

    @property
    def library_calls(self) -> tuple[Call, ...]:
        """Kernels of mlx-lm's own that the model launches on a GPU beside this layer's state."""
        return ()

    def trials(
        self,
        dtype: mx.Dtype,
        elements: mx.Dtype,
        block_size: int,
        backend: KVBackend,
        host: StatefulLayer | None = None,
    ) -> Iterable[tuple[Hashable, Callable[[], mx.array]]]:
        """Small launches that compile, between them, all kernels that the layer may ever launch.

        Each has a key; of launches with one key any may stand for all. `host` is the layer in whose
        storage states lie, if there is one.
        """
        return ()

    def gathers(self, backend: KVBackend) -> bool:
        """Whether a longer context takes more memory in a step, beside the pool: see `profile`."""
        return False

    def profile(
        self,
        context: int,
        bounds: StepBounds,
        dtype: mx.Dtype,
        elements: mx.Dtype,
        backend: KVBackend,
    ) -> None:
        """Runs the layer's largest calls over so long a context, for the peak of MLX's memory.

        Args:
            context: tokens of a request.
            bounds: of a step.
            dtype: of the model's queries.
            elements: dtype of K and V in the pool.
            backend: see `allocate`.
        """
        return


@dataclass(frozen=True)
class StepBounds:
    """What a step may hold at most."""

    num_tokens: int
    max_num_seqs: int
    block_size: int
