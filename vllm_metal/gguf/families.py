# SPDX-License-Identifier: Apache-2.0
"""Names each GGUF tensor as mlx-lm has it, by model family; lists the families that convert."""

from collections.abc import Mapping
from dataclasses import dataclass

from .source import ConversionError, GGUFSource

_COMMON = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
# Gemma 3 has a norm before and after each half of a layer, so ffn_norm means another norm here.
_GEMMA3 = {
    **_COMMON,
    **_QK_NORM,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ATTENTION_INPUTS = ("attn_q", "attn_k", "attn_v")
# config.py reads it: it becomes rope_scaling and no weight.
ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True)
class Family:
    """How one GGUF architecture differs from others."""

    model_type: str
    """`model_type` of config.json; also the module of mlx_lm.models that runs it."""
    hf_class: str
    """Entry of `architectures` in config.json."""
    layer_names: Mapping[str, str]
    """Stem under `blk.N.` in GGUF -> module under `model.layers.N.`."""
    biased: tuple[str, ...] = ()
    """Stems of tensors that always have a bias."""
    interleaved_rope: bool = False
    """GGUF holds rows of q and k in the order of the interleaved form of RoPE."""
    norm_offset: float = 0.0
    """GGUF stores RMSNorm weights with this added; mlx-lm's model adds it when it runs."""
    default_dtype: str = "float16"
    """Element type where all matrices of the file are quantised."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", _COMMON, interleaved_rope=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", _COMMON, biased=_ATTENTION_INPUTS),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", {**_COMMON, **_QK_NORM}),
    # Gemma 3's activations exceed float16's range; vLLM refuses float16 for it, too.
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _GEMMA3,
        norm_offset=1.0,
        default_dtype="bfloat16",
    ),
}


def family_of(source: GGUFSource) -> Family:
    """The family of `source`.

    Raises:
        ConversionError: the architecture is none of FAMILIES; the message lists them.
    """
    family = FAMILIES.get(source.architecture)
    if family is None:
        raise ConversionError(
            f"{source.path}: architecture {source.architecture!r} cannot be converted; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    if source.arch("expert_count", 0):
        raise ConversionError(
            f"{source.path}: a mixture-of-experts {source.architecture} cannot be converted; "
            f"supported: dense models of {', '.join(sorted(FAMILIES))}"
        )
    return family


def has_attention_bias(source: GGUFSource) -> bool:
    """Whether the attention projections have biases."""
    return "blk.0.attn_q.bias" in source.tensors


def is_tied(source: GGUFSource) -> bool:
    """Whether the output head is the embedding: GGUF then has no `output.weight`."""
    return "output.weight" not in source.tensors


def tensor_names(family: Family, source: GGUFSource) -> dict[str, str]:
    """GGUF name -> parameter name, for all tensors of the model, in file order.

    Raises:
        ConversionError: the file lacks a tensor of the family, or has one that the family does not
            have: either would give a model that runs and answers wrongly.
    """
    names = {"token_embd.weight": "model.embed_tokens.weight"}
    names["output_norm.weight"] = "model.norm.weight"
    if not is_tied(source):
        names["output.weight"] = "lm_head.weight"
    biased = set(family.biased)
    if has_attention_bias(source) and not biased:
        biased = {*_ATTENTION_INPUTS, "attn_output"}
    for layer in range(source.require_arch("block_count")):
        for stem, module in family.layer_names.items():
            names[f"blk.{layer}.{stem}.weight"] = f"model.layers.{layer}.{module}.weight"
            if stem in biased:
                names[f"blk.{layer}.{stem}.bias"] = f"model.layers.{layer}.{module}.bias"
    present = [name for name in source.tensors if name != ROPE_FREQS]
    missing = [name for name in names if name not in source.tensors]
    unknown = [name for name in present if name not in names]
    for what, found in (("lacks", missing), ("holds unknown", unknown)):
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise ConversionError(
                f"{source.path}: the file {what} tensors of a {source.architecture} model: "
                f"{', '.join(found[:3])}{more}"
            )
    return {name: names[name] for name in present}
