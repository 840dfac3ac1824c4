# SPDX-License-Identifier: Apache-2.0
"""Estimates a drafter's memory beside a model: weights, K/V, and a block drafter's context writes.

Passes of drafters are not counted: over blocks they have fewer rows than the step that verifies
their drafts, an assistant's have one, and an MTP layer's over a prompt take no more than a layer of
the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import torch

from vllm_metal.cli.fit.estimate import Model
from vllm_metal.engine.attention.context_layer import ContextLayer
from vllm_metal.engine.kv_cache.formats import MLX_DTYPES
from vllm_metal.engine.models.loader import weight_bytes
from vllm_metal.engine.models.mtp_families import MTP_FAMILIES
from vllm_metal.engine.models.mtp_weights import mtp_weights
from vllm_metal.engine.spec_decode import block_config, mtp_folders, packed_network
from vllm_metal.engine.spec_decode.assistant import Assistant
from vllm_metal.engine.spec_decode.assistant_config import AssistantConfig
from vllm_metal.engine.spec_decode.block_config import BlockConfig
from vllm_metal.engine.spec_decode.block_drafter import (
    BlockDrafter,
    draft_layers,
    is_left_out,
    join_target,
)
from vllm_metal.engine.spec_decode.checkpoint import default_mtp_drafts
from vllm_metal.engine.spec_decode.mtp import build_layer
from vllm_metal.engine.spec_decode.mtp_folders import published
from vllm_metal.engine.weights.files import stored_arrays
from vllm_metal.identity.model_files import ModelLoadError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Dtypes of arrays that are not loaded in the drafter's own.
_LOADED_AS = {dtype: dtype for dtype in (mx.uint32, mx.uint8, mx.int32)} | {mx.int64: mx.int32}


@dataclass(frozen=True)
class Drafter:
    """A block drafter or an assistant, whose weights are not loaded."""

    method: str  # method in --speculative-config
    weights: int  # bytes, as the engine will hold them
    num_drafts: int
    network: BlockDrafter | None  # built; None: an assistant, which keeps no K/V

    @staticmethod
    def read(folder: Path, dtype: torch.dtype, bits: int | None, count: int | None) -> Drafter:
        """Builds a drafter.

        Args:
            folder: has config.json and weight files, of which only headers are read.
            dtype: dtype of the engine.
            bits: --additional-config draft_quantization.
            count: num_speculative_tokens; None: the default.

        Raises:
            ValueError: the model is no such drafter, drafts fewer tokens than `count`, or is an
                assistant and has `bits`.
            ModelLoadError: config.json has keys that are not supported.
        """
        content = json.loads((folder / "config.json").read_text())
        if mtp_folders.is_assistant(content):
            return _assistant(folder, content, MLX_DTYPES[dtype], bits, count)
        architecture = block_config.architecture_of(content)
        if (kind := block_config.KINDS.get(architecture)) is None:
            raise ValueError(
                f"--draft-model of architecture {architecture} is not supported: choose one of "
                f"{', '.join(block_config.KINDS)}, or Gemma 4's assistant"
            )
        shape = BlockConfig.of(content, content, architecture)
        most = block_config.most_drafts(content, kind.method) or block_config.DEFAULT_DRAFTS
        if count is not None and count > most:
            raise ValueError(f"--num-speculative-tokens {count}: the maximum is {most}")
        computed = mx.float32 if dtype == torch.float32 else mx.bfloat16
        network = BlockDrafter(shape, computed, MLX_DTYPES[dtype])
        network.set_dtype(computed)
        weights = _stored(folder, computed, is_left_out)
        if bits is not None:
            before = _nbytes(network)
            packed_network.pack(network.network, bits)
            weights += _nbytes(network) - before
        drafts = count or min(block_config.DEFAULT_DRAFTS, most)
        return Drafter(kind.method, weights, drafts, network)

    def add_to(self, model: Model) -> Model:
        """Adds the drafter to a model, whose forwards then write the drafter's K/V, too.

        Raises NotImplementedError: the model lacks layers whose hidden states the drafter reads.
        """
        if self.network is None:
            return replace(model, draft_weights=self.weights)
        join_target(self.network, model.parts)
        # The recorder of forwards takes the model's parameters for weights.
        model.parts.model.draft = self.network
        layers = draft_layers(self.network.config, self.network.dtype)
        return replace(
            model,
            draft_weights=self.weights,
            draft_layers=layers,
            context_layers=[ContextLayer.of(layer) for layer in layers],
        )


@dataclass(frozen=True)
class MTPDrafter:
    """MTP layers or an assistant, which draft by default; their weights are not loaded."""

    folder: Path  # the model's, or that of split layers
    num_drafts: int

    @staticmethod
    def find(model: str) -> MTPDrafter | None:
        """Finds a model's drafter on this disk by the model's name; None: there is none."""
        folder = mtp_folders.folder_of(model)
        found = None if folder is None else mtp_folders.layers_of(folder)
        if found is None or not mtp_folders.is_depth_supported(content := published(found)):
            return None
        if mtp_folders.unknown_key(content) is not None:  # it is served without
            return None
        if mtp_folders.is_assistant(content):
            try:
                AssistantConfig.of(content)
            except ModelLoadError:  # it is served without
                return None
        return MTPDrafter(found, default_mtp_drafts(content))

    def add_to(self, model: Model) -> Model:
        """Adds the drafter to a model.

        Raises:
            NotImplementedError: a layer has a kind of state that the paged path does not support.
            ModelLoadError: the weights are unreadable.
        """
        content = published(self.folder)
        if mtp_folders.is_assistant(content):
            return Drafter.read(self.folder, model.dtype, None, self.num_drafts).add_to(model)
        is_split = mtp_folders.is_split(content)
        names = mtp_folders.architecture_of(content)
        family = MTP_FAMILIES[names] if names else mtp_folders.family_of(content)
        assert family is not None  # else it is not found
        args, dtype = model.parts.text_args, MLX_DTYPES[model.dtype]
        checkpoint = SimpleNamespace(
            model=str(self.folder), revision=None, hf_config=SimpleNamespace(is_split=is_split)
        )
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(draft_model_config=checkpoint),
            model_config=SimpleNamespace(dtype=model.dtype),
        )
        of_target = family, model.parts.model, args.num_hidden_layers
        weights, layers = 0, []
        for index in range(min(mtp_folders.num_drafting(content), self.num_drafts)):
            head, states = build_layer(family, args, content, dtype, index)
            placed = mtp_weights(cast("VllmConfig", config), *of_target, head, index)
            layers += states
            weights += sum(
                array.nbytes
                for name, array in placed.arrays.items()
                if not index or family.numbers_on or not name.startswith(family.shared)
            )
        return replace(model, draft_weights=weights, draft_layers=layers)


def _assistant(
    folder: Path, content: Mapping[str, Any], dtype: mx.Dtype, bits: int | None, count: int | None
) -> Drafter:
    if bits is not None:
        raise ValueError(
            f"--draft-quantization {bits} is not supported with Gemma 4's assistant: most of its "
            "weights are its embedding. Choose a quantized folder"
        )
    head = Assistant(AssistantConfig.of(content))
    weights = _stored(folder, dtype, head.leaves_out)
    return Drafter("mtp", weights, count or default_mtp_drafts(content), None)


def _stored(folder: Path, dtype: mx.Dtype, leaves_out: Callable[[str], bool]) -> int:
    """Returns the bytes of the arrays to load; unpacked ones count in the drafter's dtype."""
    return sum(
        array.size * _LOADED_AS.get(array.dtype, dtype).size
        for name, array in stored_arrays(folder)
        if not leaves_out(name)
    )


def _nbytes(network: BlockDrafter) -> int:
    return weight_bytes(network.network)
