# SPDX-License-Identifier: Apache-2.0
"""What reads a kind of layer off a model."""

from __future__ import annotations

from abc import ABC, abstractmethod

from vllm_metal.kv_cache.stateful_layer import StatefulLayer


class Probe(ABC):
    """Stands where the model expects a layer's cache, and notes what the layer does with it."""

    @abstractmethod
    def layer(self, name: str) -> StatefulLayer:
        """What was noted, once a forward has been built.

        Raises:
            NotImplementedError: the layer cannot be served; the message goes on after the name of
                the model's type.
        """
