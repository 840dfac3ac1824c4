# SPDX-License-Identifier: Apache-2.0
"""Lists supported encoder architectures, and what their config.json may contain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_metal.engine.config_json import config_keys
from vllm_metal.engine.config_json.inert_keys import GENERAL, is_inert, names
from vllm_metal.engine.config_json.reference_code import reference_of
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.settings.runner import pools

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """Encoders computed by one module of mlx-vlm or mlx-lm, and the config keys it supports."""

    module: str  # module name
    by_mlx_vlm: bool
    #: Keys of config.json used by the module or by our code around it.
    read: frozenset[str]
    #: Keys with their supported values; the first is the default.
    fixed: Mapping[str, tuple[Any, ...]]
    inert: frozenset[str] = frozenset()  # keys without effect, besides `inert_keys`
    #: Returns the number of positions for a config.json; None: unlimited.
    positions: Callable[[Config], int] | None = None


@dataclass(frozen=True)
class Architecture:
    """A supported entry of `architectures` in a config.json: its family and its head."""

    family: Family
    classifies: bool = False  # has a head over labels


#: Keys of transformers' first encoders, which differ in their first position.
_BERT_READ = names(
    "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size "
    "max_position_embeddings type_vocab_size layer_norm_eps pad_token_id"
)
_BERT_FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}
#: Keys of a pooler and of heads that transformers and vLLM ignore, and keys vLLM reads itself.
_INERT = names(
    "directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers "
    "pooler_size_per_head pooler_type tie_word_embeddings gradient_checkpointing output_past "
    "sentence_transformers sbert_ce_default_activation_function matryoshka_dimensions "
    "is_matryoshka use_pad_token use_sep_token head_dtype embedding_size"
)


def _positions_after_padding(config: Config) -> int:
    # RoBERTa's table reserves the positions up to and including the padding's.
    return int(config["max_position_embeddings"]) - int(config.get("pad_token_id", 1)) - 1


BERT = Family(
    "bert",
    True,
    _BERT_READ,
    _BERT_FIXED,
    _INERT,
    lambda config: int(config["max_position_embeddings"]),
)
ROBERTA = Family("xlm_roberta", True, _BERT_READ, _BERT_FIXED, _INERT, _positions_after_padding)
MODERNBERT = Family(
    "modernbert",
    True,
    names(
        "vocab_size hidden_size num_hidden_layers intermediate_size num_attention_heads norm_eps "
        "norm_bias global_rope_theta local_rope_theta rope_parameters attention_bias layer_types "
        "global_attn_every_n_layers local_attention mlp_bias classifier_pooling classifier_bias "
        "hidden_activation"
    ),
    {
        "hidden_activation": ("gelu",),
        "classifier_activation": ("gelu",),
        "rope_scaling": (None,),
    },
    # transformers' class reads norm_eps, and rotates queries and keys for any
    # position_embedding_type.
    _INERT
    | names(
        "decoder_bias deterministic_flash_attn initializer_cutoff_factor layer_norm_eps "
        "mlp_dropout position_embedding_type reference_compile repad_logits_with_grad "
        "sparse_pred_ignore_index sparse_prediction"
    ),
)
#: `models.published_config` judges its other keys, as for models that generate.
EMBEDDING_GEMMA = Family("gemma3_text", False, frozenset(), {})

_HEAD = partial(Architecture, classifies=True)
ARCHITECTURES: Mapping[str, Architecture] = {
    "BertModel": Architecture(BERT),
    "BertForSequenceClassification": _HEAD(BERT),
    "RobertaModel": Architecture(ROBERTA),
    "RobertaForMaskedLM": Architecture(ROBERTA),  # vLLM embeds with it
    "RobertaForSequenceClassification": _HEAD(ROBERTA),
    "XLMRobertaModel": Architecture(ROBERTA),
    "XLMRobertaForSequenceClassification": _HEAD(ROBERTA),
    "ModernBertModel": Architecture(MODERNBERT),
    "ModernBertForSequenceClassification": _HEAD(MODERNBERT),
    "Gemma3TextModel": Architecture(EMBEDDING_GEMMA),
}


def of_config(config: VllmConfig) -> Architecture | None:
    """Returns the configured encoder; None if the model is not an encoder."""
    if not pools(config):
        return None
    model = config.model_config
    found = ARCHITECTURES.get(model.architecture)
    if found is None or (found.family is EMBEDDING_GEMMA and is_causal(model.hf_config)):
        return None
    return found


def of_content(content: Config) -> Architecture | None:
    """Returns the encoder for a config.json alone, assuming vLLM's default runner."""
    (name, *_) = content.get("architectures") or ("",)
    found = ARCHITECTURES.get(name)
    causal = not content.get("use_bidirectional_attention", False)
    return None if found is not None and found.family is EMBEDDING_GEMMA and causal else found


def refuse_others(content: Config) -> None:
    """Rejects unsupported encoders of supported families.

    Raises ModelLoadError: lists the supported architectures.
    """
    families = [name.removesuffix("Model") for name in ARCHITECTURES if name.endswith("Model")]
    (name, *_) = content.get("architectures") or ("",)
    if name.startswith(tuple(families)):
        raise ModelLoadError(
            f"architecture {name} is not supported: of bidirectional encoders, choose one of "
            f"{', '.join(ARCHITECTURES)}"
        )


def is_causal(hf_config: Any) -> bool:
    """Returns whether a Gemma model uses causal attention."""
    return not getattr(hf_config, "use_bidirectional_attention", False)


def check_config(config: Config, family: Family) -> None:
    """Checks config.json, including --hf-overrides, for values that `family` does not compute.

    Raises ModelLoadError: a value is not supported, or a key that may matter is not read.
    """
    for key, values in family.fixed.items():
        value = config.get(key)
        if value is not None and value not in values:
            raise ModelLoadError(
                f"config.json sets {key}={value!r}, but mlx-vlm's module {family.module!r} "
                f"supports only {' or '.join(map(repr, values))}"
            )
    known = family.read | family.fixed.keys() | family.inert | GENERAL
    reference = reference_of(config)
    unread: dict[config_keys.Path, Any] = {
        (key,): value
        for key, value in config.items()
        if value is not None
        and key not in known
        and not is_inert(key, family.module, False)
        and not reference.is_default(key, value)
    }
    config_keys.judge(unread, family.module, config, reference, library="mlx-vlm")


def num_labels(config: Config) -> int:
    """Returns the number of labels, as transformers counts them."""
    if config.get("id2label"):
        return len(config["id2label"])
    return int(config.get("num_labels") or 2)
