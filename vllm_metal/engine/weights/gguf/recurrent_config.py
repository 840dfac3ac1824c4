# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json for GGUF families with recurrent layers; see family_config.py."""

from .family_config import LEFT_OUT, Config, deepseek_experts
from .source import ConversionError, GGUFSource


def _linear_attention(source: GGUFSource, layers: int) -> Config:
    interval = source.require_arch("full_attention_interval")
    kinds = [
        "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
        for layer in range(layers)
    ]
    stated = source.arch("attention.recurrent_layers")
    if stated is not None and [bool(each) for each in stated[:layers]] != [
        kind == "linear_attention" for kind in kinds
    ]:
        raise ConversionError(
            f"{source.path}: {source.architecture}.attention.recurrent_layers is not supported: "
            "mlx-lm's module needs full attention in exactly the layers whose number is a multiple "
            f"of full_attention_interval={interval}. Serve the model's safetensors files instead"
        )
    value_heads = source.require_arch("ssm.time_step_rank")
    return {
        "layer_types": kinds,
        "full_attention_interval": interval,
        "linear_conv_kernel_dim": source.require_arch("ssm.conv_kernel"),
        "linear_key_head_dim": source.require_arch("ssm.state_size"),
        "linear_num_key_heads": source.require_arch("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": source.require_arch("ssm.inner_size") // value_heads,
        "attention_bias": False,
    }


def qwen3_next(source: GGUFSource, config: Config) -> Config:
    return _linear_attention(source, config["num_hidden_layers"])


def qwen35(source: GGUFSource, config: Config) -> Config:
    return {
        **_linear_attention(source, config["num_hidden_layers"]),
        "rope_theta": LEFT_OUT,
        "partial_rotary_factor": LEFT_OUT,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config["rope_theta"],
            "mrope_section": [n for n in source.require_arch("rope.dimension_sections") if n],
            "mrope_interleaved": True,
            "partial_rotary_factor": config["partial_rotary_factor"],
        },
    }


def _attention_layers(source: GGUFSource) -> list[bool]:
    by_layer = source.require_arch("attention.head_count_kv")
    if not isinstance(by_layer, list):
        raise ConversionError(
            f"{source.path}: {source.architecture}.attention.head_count_kv has no list of layers"
        )
    return [heads > 0 for heads in by_layer]


def lfm2(source: GGUFSource, config: Config) -> Config:
    attention = _attention_layers(source)
    return {
        "conv_bias": any(".shortconv.in_proj.bias" in name for name in source.tensors),
        "layer_types": ["full_attention" if attends else "conv" for attends in attention],
        "tie_word_embeddings": True,
    }


def lfm2_dense(source: GGUFSource, config: Config) -> Config:
    attention = _attention_layers(source)
    return {
        **lfm2(source, config),
        "full_attn_idxs": [layer for layer, attends in enumerate(attention) if attends],
        "block_dim": config["hidden_size"],
        "block_ff_dim": config["intermediate_size"],
    }


def _mamba2(source: GGUFSource, config: Config) -> Config:
    heads = source.require_arch("ssm.time_step_rank")
    inner = source.require_arch("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": source.require_arch("ssm.state_size"),
        "mamba_d_conv": source.require_arch("ssm.conv_kernel"),
        "mamba_n_groups": source.require_arch("ssm.group_count"),
        "mamba_expand": inner // config["hidden_size"],
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in source.tensors),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in source.tensors),
    }


def granite_hybrid(source: GGUFSource, config: Config) -> Config:
    has_rope = source.arch("rope.scaling.finetuned", True)
    return {
        **_mamba2(source, config),
        **granite_shared(source, config),
        "layer_types": ["attention" if each else "mamba" for each in _attention_layers(source)],
        "position_embedding_type": "rope" if has_rope else "nope",
    }


def granite_shared(source: GGUFSource, config: Config) -> Config:
    """Describes Granite with shared experts as a hybrid model with attention in all layers."""
    return {
        "num_local_experts": source.arch("expert_count", 0),
        "num_experts_per_tok": source.arch("expert_used_count", 0),
        "shared_intermediate_size": source.require_arch("expert_shared_feed_forward_length"),
        "layer_types": ["attention"] * config["num_hidden_layers"],
        "position_embedding_type": "rope",
    }


def nemotron_h(source: GGUFSource, config: Config) -> Config:
    marks = {"ssm_in": "M", "attn_q": "*", "ffn_up": "-", "ffn_up_exps": "E"}
    pattern = "".join(
        mark
        for layer in range(config["num_hidden_layers"])
        for stem, mark in marks.items()
        if f"blk.{layer}.{stem}.weight" in source.tensors
    )
    widths = source.require_arch("feed_forward_length")
    mamba = _mamba2(source, config)
    return {
        "hybrid_override_pattern": pattern,
        "intermediate_size": max(widths) if isinstance(widths, list) else widths,
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "n_groups": mamba["mamba_n_groups"],
        "expand": mamba["mamba_expand"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "mamba_proj_bias": mamba["mamba_proj_bias"],
        "attention_bias": "attn_q.bias" in " ".join(source.tensors),
        "mlp_bias": "ffn_up.bias" in " ".join(source.tensors),
        "rope_theta": LEFT_OUT,
        "partial_rotary_factor": LEFT_OUT,
    }


def nemotron_h_moe(source: GGUFSource, config: Config) -> Config:
    experts = deepseek_experts(source, config)
    del experts["first_k_dense_replace"]
    return {
        **nemotron_h(source, config),
        **experts,
        "moe_shared_expert_intermediate_size": source.require_arch(
            "expert_shared_feed_forward_length"
        ),
        "moe_latent_size": source.arch("moe_latent_size"),
    }


def jamba(source: GGUFSource, config: Config) -> Config:
    attention = _attention_layers(source)
    routed = [
        layer
        for layer in range(len(attention))
        if f"blk.{layer}.ffn_gate_exps.weight" in source.tensors
    ]
    period = routed[1] - routed[0] if len(routed) > 1 else len(attention)
    if routed != list(range(routed[0], len(attention), period)):
        raise ConversionError(
            f"{source.path}: layers with experts ({routed}) have no fixed period, which mlx-lm's "
            "jamba needs"
        )
    attends = [layer for layer, each in enumerate(attention) if each]
    return {
        "layers_block_type": ["attention" if each else "mamba" for each in attention],
        "attn_layer_offset": attends[0],
        "attn_layer_period": attends[1] - attends[0] if len(attends) > 1 else len(attention),
        "expert_layer_offset": routed[0],
        "expert_layer_period": period,
        "mamba_expand": source.require_arch("ssm.inner_size") // config["hidden_size"],
        "rope_theta": LEFT_OUT,
    }


def falcon_h1(source: GGUFSource, config: Config) -> Config:
    return {
        **_mamba2(source, config),
        "mamba_d_ssm": source.require_arch("ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in source.tensors,
        "projectors_bias": "blk.0.ssm_out.bias" in source.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in source.tensors,
        "rope_scaling": config.get("rope_scaling"),
    }


def mamba2(source: GGUFSource, config: Config) -> Config:
    mamba = _mamba2(source, config)
    return {
        "num_heads": mamba["mamba_n_heads"],
        "head_dim": mamba["mamba_d_head"],
        "state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "n_groups": mamba["mamba_n_groups"],
        "expand": mamba["mamba_expand"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "use_bias": mamba["mamba_proj_bias"],
    }
