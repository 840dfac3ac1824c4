# SPDX-License-Identifier: Apache-2.0
"""Interface of draft networks: loaded before the pool exists, they make proposers over it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_metal.engine.batch.requests import BlockTables
from vllm_metal.engine.kv_cache.layer_cache import KVBackend
from vllm_metal.engine.kv_cache.layer_state import LayerState
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer
from vllm_metal.engine.models.compiled import Graphs
from vllm_metal.engine.spec_decode.proposer import Proposer

if TYPE_CHECKING:
    from vllm_metal.engine.batch.requests import Requests
    from vllm_metal.engine.spec_decode.draft_writer import DraftWriter
    from vllm_metal.engine.vision.column import ImageColumn

#: Prefix of the layer names under which vLLM allocates a draft network's K/V.
LAYER_PREFIX = "draft."


@dataclass(frozen=True)
class DraftPool:
    """The KV pool that a draft network shares with its target."""

    layer_states: Mapping[str, LayerState]  # storage by layer name, of both networks
    group_of: Mapping[str, int]  # KV cache group by layer name
    block_tables: BlockTables  # of the requests
    graphs: Graphs  # says whether forwards may be compiled, and counts the compiled ones


class DraftNetwork(ABC):
    """A loaded draft network, which makes a proposer once the KV pool exists."""

    layers: Sequence[StatefulLayer]  # its share of the KV cache; may be empty
    #: Those whose K/V the target's forward writes, in the order of its last caches.
    context_layers: Sequence[StatefulLayer] = ()
    #: The target's layers, as the network attends to the K/V that only the target writes.
    reading_layers: Sequence[StatefulLayer] = ()

    def read_images(self, images: ImageColumn) -> None:  # noqa: B027 - most read hidden states alone
        """Makes the network read the target's images; called before the pool exists.

        Raises:
            ModelLoadError: the network cannot read images.
        """

    @abstractmethod
    def profile(self, backend: KVBackend) -> None:
        """Runs the network's largest pass once, so that MLX's peak memory is measured."""

    @abstractmethod
    def proposer(self, pool: DraftPool) -> Proposer:
        """Makes the proposer over the pool."""

    def writer(self, pool: DraftPool, requests: Requests) -> DraftWriter | None:
        """Makes the writer of the network's K/V on an engine that does not draft.

        Args:
            pool: shared with the target.
            requests: requests with blocks to write.

        Returns:
            None: the target's forward already writes the K/V.

        Raises:
            NotImplementedError: the network keeps no K/V.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps no K/V")
