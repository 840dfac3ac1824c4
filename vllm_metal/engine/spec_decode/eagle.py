# SPDX-License-Identifier: Apache-2.0
"""Loads EAGLE and EAGLE-3 heads for a target whose hidden states they read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from vllm_metal.engine.attention.layers import AttentionLayer
from vllm_metal.engine.models import loader
from vllm_metal.engine.models.parts import HiddenStates, ModelParts
from vllm_metal.engine.spec_decode import vocabulary
from vllm_metal.engine.spec_decode.eagle_head import Eagle3Head, EagleHead, HeadConfig
from vllm_metal.engine.spec_decode.network import LAYER_PREFIX
from vllm_metal.engine.spec_decode.paged_head import HeadNetwork
from vllm_metal.engine.spec_decode.registry import EAGLE_HEADS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: A head's module by its generation.
MODULES: dict[str, type[EagleHead] | type[Eagle3Head]] = {
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
}


class Eagle(HeadNetwork):
    def __init__(self, config: VllmConfig, target: ModelParts) -> None:
        """Loads the head and makes the target record its hidden states from now on.

        Args:
            config: vLLM's; its speculative_config names the head.
            target: the model that the head was trained for.

        Raises:
            loader.ModelLoadError: the checkpoint cannot be loaded, or is for another target.
            NotImplementedError: the target does not expose the hidden states that the head reads.
        """
        speculation = config.speculative_config
        assert speculation is not None
        model_config = speculation.draft_model_config
        (architecture, *_) = model_config.architectures
        generation = EAGLE_HEADS[architecture]  # the platform has refused all others
        shape = HeadConfig.from_config(model_config.hf_config.to_dict())
        # `t2d` says the same as `d2t`; MLX computes the tables of rotary angles.
        weights = {
            name.replace("midlayer.", "layers.0."): array
            for name, array in loader.load_weights(model_config, config).items()
            if name != "t2d" and "rotary_emb" not in name
        }
        head = MODULES[generation](shape, set(weights))
        try:
            head.load_weights(list(weights.items()))
        except ValueError as error:
            raise loader.ModelLoadError(
                f"the weights of {model_config.model} are not of {architecture}: {error}. Choose "
                "another draft head"
            ) from error
        if "embed_tokens" in head:
            head.embed_tokens = vocabulary.bounded(head.embed_tokens, config)
        else:
            head.embed_tokens = target.input_embedding
        if "lm_head" in head:
            vocabulary.check_drafted(head.drafted_tokens(), config)
        else:
            head.lm_head = target.output_head
        mx.eval(head.parameters())
        args = shape.decoder
        head_size = args.head_dim or args.hidden_size // args.num_attention_heads
        assert args.num_key_value_heads is not None
        layers = [
            AttentionLayer(
                f"{LAYER_PREFIX}layers.{index}",
                args.num_attention_heads,
                args.num_key_value_heads,
                head_size,
                None,
            )
            for index in range(args.num_hidden_layers)
        ]
        states = HiddenStates(target, head.layer_ids(len(target.model.layers)))
        super().__init__(config, head, layers, states)
