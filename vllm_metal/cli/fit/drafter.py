# SPDX-License-Identifier: Apache-2.0
"""What a block drafter takes beside a model: weights, K/V, and the writes of its context.

Passes over blocks are not counted: they have fewer rows than the step that verifies their drafts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import torch

from vllm_metal.cli.fit.estimate import Model
from vllm_metal.engine.attention.context_layer import ContextLayer
from vllm_metal.engine.kv_cache.formats import MLX_DTYPES
from vllm_metal.engine.models.loader import weight_bytes
from vllm_metal.engine.spec_decode import block_config, packed_network
from vllm_metal.engine.spec_decode.block_config import BlockConfig
from vllm_metal.engine.spec_decode.block_drafter import (
    BlockDrafter,
    draft_layers,
    is_left_out,
    join_target,
)
from vllm_metal.engine.weights.files import stored_arrays

#: What vLLM calls architectures that checkpoints call otherwise.
_RENAMED = {
    "DSparkDraftModel": "Qwen3DSparkModel",
    "MuseGlimmerAssistantModel": "DFlashMuseGlimmerAssistantModel",
}


@dataclass(frozen=True)
class Drafter:
    """A block drafter that is built and not loaded."""

    method: str  # of --speculative-config
    weights: int  # bytes, as the engine will hold them
    num_drafts: int
    network: BlockDrafter

    @staticmethod
    def read(folder: Path, dtype: torch.dtype, bits: int | None, count: int | None) -> Drafter:
        """Builds a drafter.

        Args:
            folder: with config.json and weight files, of which only headers are read.
            dtype: of the engine.
            bits: of --additional-config draft_quantization.
            count: num_speculative_tokens; None: the default.

        Raises:
            ValueError: it is no block drafter, or drafts fewer tokens.
            ModelLoadError: config.json has keys that are not computed.
        """
        content = json.loads((folder / "config.json").read_text())
        (given, *_) = content.get("architectures") or ("none",)
        architecture = _RENAMED.get(given, given)
        if architecture not in block_config.MODULES:
            raise ValueError(
                f"--draft-model of architecture {given} is not supported: choose one of "
                f"{', '.join(block_config.MODULES)}"
            )
        shape = BlockConfig.of(content, content, architecture)
        method = "dspark" if shape.markov_rank is not None else "dflash"
        most = block_config.most_drafts(content, method) or block_config.DEFAULT_DRAFTS
        if count is not None and count > most:
            raise ValueError(f"--num-speculative-tokens {count}: the drafter drafts {most} at most")
        computed = mx.float32 if dtype == torch.float32 else mx.bfloat16
        network = BlockDrafter(shape, computed, MLX_DTYPES[dtype])
        network.set_dtype(computed)
        weights = _stored(folder, computed, bool(content.get("quantization")))
        if bits is not None:
            before = _nbytes(network)
            packed_network.pack(network.network, bits)
            weights += _nbytes(network) - before
        drafts = count or min(block_config.DEFAULT_DRAFTS, most)
        return Drafter(method, weights, drafts, network)

    def beside(self, model: Model) -> Model:
        """The model with the drafter, whose K/V its forwards write.

        Raises:
            NotImplementedError: the model has no such layers as it reads.
        """
        join_target(self.network, model.parts)
        # The recorder of forwards takes the model's parameters for weights.
        model.parts.model.draft = self.network
        layers = draft_layers(self.network.config, self.network.dtype)
        return replace(
            model,
            draft_weights=self.weights,
            guests=layers,
            context_layers=[ContextLayer.of(layer) for layer in layers],
        )


def _stored(folder: Path, dtype: mx.Dtype, packed: bool) -> int:
    """Bytes of the arrays that are loaded, in the drafter's dtype where they are not packed."""
    total = 0
    for name, array in stored_arrays(folder):
        if not is_left_out(name):
            whole = array.dtype in (mx.uint32, mx.uint8, mx.int32, mx.int64)
            total += array.nbytes if whole else array.size * dtype.size
    return total


def _nbytes(network: BlockDrafter) -> int:
    return weight_bytes(network.network)
