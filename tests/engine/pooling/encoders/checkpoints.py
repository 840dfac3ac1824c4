# SPDX-License-Identifier: Apache-2.0
"""Small random encoders, made and saved by transformers, which is the reference."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

_SIZES = {
    "vocab_size": 90,
    "hidden_size": 48,  # its root has no short binary form
    "num_attention_heads": 4,
    "intermediate_size": 80,
}
_BERT = {**_SIZES, "num_hidden_layers": 2, "max_position_embeddings": 130}
#: Required by vLLM, no longer written by transformers 5.
_XLMR = {**_BERT, "pad_token_id": 1, "position_embedding_type": "absolute"}
_MODERN = {
    **_SIZES,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "local_attention": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
_GEMMA = {
    **_SIZES,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "use_bidirectional_attention": True,
}

#: Maps architectures to transformers' configuration and its arguments.
CONFIGS: dict[str, tuple[type[PretrainedConfig], dict]] = {
    "BertModel": (transformers.BertConfig, _BERT),
    "BertForSequenceClassification": (transformers.BertConfig, _BERT | {"num_labels": 3}),
    "XLMRobertaModel": (transformers.XLMRobertaConfig, _XLMR),
    "XLMRobertaForSequenceClassification": (
        transformers.XLMRobertaConfig,
        _XLMR | {"num_labels": 1},
    ),
    "ModernBertModel": (transformers.ModernBertConfig, _MODERN),
    "ModernBertForSequenceClassification": (
        transformers.ModernBertConfig,
        _MODERN | {"num_labels": 3, "classifier_pooling": "mean", "norm_bias": True},
    ),
    "Gemma3TextModel": (transformers.Gemma3TextConfig, _GEMMA),
}


def make(architecture: str, folder: Path, **changes) -> PreTrainedModel:
    """Saves and returns a model with random weights.

    Args:
        architecture: a key of CONFIGS.
        folder: target folder.
        changes: configuration changes.
    """
    config_class, values = CONFIGS[architecture]
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config_class(**(values | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # transformers initializes biases to 0 and norms to 1, which would hide errors.
            if "norm" in name.lower() or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return model


def texts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Makes texts of random tokens without padding."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, _SIZES["vocab_size"], length).tolist() for length in lengths]


@torch.no_grad()
def hidden_states(model: PreTrainedModel, tokens: list[int], types: list[int] | None = None):
    """Returns [T, H] float32 of one text, alone, by transformers."""
    body = getattr(model, model.base_model_prefix, model)
    given = {} if types is None else {"token_type_ids": torch.tensor([types])}
    out = body(torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)), **given)
    return out.last_hidden_state[0].numpy()
