# SPDX-License-Identifier: Apache-2.0
"""EAGLE and EAGLE-3 as proposers: a head of a layer or so on the target's hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.attention.layers import AttentionLayer
from vllm_metal.models import loader, parts
from vllm_metal.spec_decode.eagle_head import Eagle3Head, EagleHead, HeadConfig
from vllm_metal.spec_decode.paged_head import HeadNetwork
from vllm_metal.spec_decode.paged_proposer import LAYER_PREFIX

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Architectures, as vLLM names them, with layers like Llama's.
HEADS: dict[str, type[EagleHead] | type[Eagle3Head]] = {
    "EagleLlamaForCausalLM": EagleHead,
    "Eagle3LlamaForCausalLM": Eagle3Head,
    "LlamaForCausalLMEagle3": Eagle3Head,
}


class Eagle(HeadNetwork):
    """A head loaded for its target."""

    def __init__(self, config: VllmConfig, target: nn.Module, selected: parts.SelectedRows) -> None:
        """Loads it, and has the target's hidden states noted from now on.

        Args:
            config: whose speculative_config names the head.
            target: the model it was trained for.
            selected: the target's row selection.

        Raises:
            loader.ModelLoadError: the checkpoint cannot be loaded, or is of another target.
            NotImplementedError: the head is of a family that is not served, or the target does not
                show what the head needs.
        """
        speculation = config.speculative_config
        assert speculation is not None
        model_config = speculation.draft_model_config
        (family, *_) = model_config.architectures
        if family not in HEADS:
            raise NotImplementedError(
                f"--speculative-config: heads of {family} are not supported (choose one of "
                f"{', '.join(HEADS)})"
            )
        shape = HeadConfig.of(model_config.hf_config.to_dict())
        weights = {
            name.replace("midlayer.", "layers.0."): array
            for name, array in loader.load_weights(model_config, config).items()
            # Masks of the reduced vocabulary and tables of angles say nothing new.
            if name != "t2d" and "rotary_emb" not in name
        }
        head = HEADS[family](shape, set(weights))
        try:
            head.load_weights(list(weights.items()))
        except ValueError as error:
            raise loader.ModelLoadError(f"{model_config.model} is no {family}: {error}") from error
        if "embed_tokens" not in head:
            head.embed_tokens = parts.input_embedding(target)
        if "lm_head" not in head:
            head.lm_head = parts.output_head(target)
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
        states = parts.HiddenStates(target, selected, head.layer_ids(len(target.layers)))
        super().__init__(config, head, layers, states)
