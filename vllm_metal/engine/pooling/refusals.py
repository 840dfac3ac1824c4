# SPDX-License-Identifier: Apache-2.0
"""Decides which settings a pooling engine rejects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm_metal.engine.pooling import sentence_transformers
from vllm_metal.settings.runner import pools

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def refusals(config: VllmConfig, encoder: bool, encoders: Iterable[str]) -> dict[str, bool]:
    """Maps rejected settings to whether each was requested; empty for engines that generate.

    encoder: whether the model is an encoder. encoders: supported encoder architectures.
    """
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    if not pools(config):
        return {}
    pooler = model.pooler_config
    assert pooler is not None
    way = f"{pooler.seq_pooling_type}/{pooler.tok_pooling_type} pooling"
    beside = "with --runner pooling"
    return _model_refusals(model, encoder, encoders) | {
        f"--speculative-config {beside} (nothing is sampled)": config.speculative_config
        is not None,
        f"--io-processor-plugin {beside}": bool(model.io_processor_plugin),
        f"--logits-processors {beside} (nothing is sampled)": bool(model.logits_processors),
        f"--enable-chunked-prefill with {way} (it reads all rows of a text at once)": (
            bool(scheduler.enable_chunked_prefill) and not model.is_chunked_prefill_supported
        ),
        f"--enable-prefix-caching with {way} (it reads rows that a hit would leave out)": (
            bool(cache.enable_prefix_caching) and not model.is_prefix_caching_supported
        ),
    }


def _model_refusals(model: ModelConfig, encoder: bool, encoders: Iterable[str]) -> dict[str, bool]:
    config, architectures = model.hf_config, ", ".join(model.architectures)
    both_ways = (
        model.attn_type == "encoder_only"
        or bool(getattr(config, "use_bidirectional_attention", False))
        or bool(getattr(config.get_text_config(), "use_bidirectional_attention", False))
    )
    left_out = sentence_transformers.left_out(model)
    return {
        f"{architectures} (supported bidirectional encoders: {', '.join(encoders)})": both_ways
        and not encoder,
        f"{architectures} (vLLM's own class pools: served are decoders that --convert adapts)": (
            model.convert_type == "none" and not both_ways
        ),
        f"{model.model} (its sentence-transformers files ask for {'; '.join(left_out)})": bool(
            left_out
        ),
    }
