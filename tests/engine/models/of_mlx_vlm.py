# SPDX-License-Identifier: Apache-2.0
"""Small text models of the families that only mlx-vlm has, by `model_type`."""

from engine.models.nested import HEAD, LAYERS, ODD
from engine.models.recurrent import Family


def _family(model_type: str, architecture: str, **config) -> Family:
    return Family(model_type, architecture, ODD | config)


FAMILIES = {
    family.module: family
    for family in (
        # A dense layer first; layers without windows have no RoPE.
        _family(
            "cohere2_moe",
            "Cohere2MoeForCausalLM",
            **HEAD,
            num_experts=5,
            num_experts_per_tok=2,
            num_shared_experts=2,
            first_k_dense_replace=1,
            prefix_dense_intermediate_size=56,
            logit_scale=0.25,
            sliding_window=7,
            layer_types=LAYERS,
            attention_bias=True,
        ),
    )
}
