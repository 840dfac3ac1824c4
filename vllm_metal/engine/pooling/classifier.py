# SPDX-License-Identifier: Apache-2.0
"""Makes the layer that scores hidden states, from the checkpoint's files or the model's head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.nn as nn
import torch

from vllm_metal.engine.models.headless import OTHER_HEAD, head_rows
from vllm_metal.engine.pooling import torch_layers
from vllm_metal.engine.weights.files import stored_arrays
from vllm_metal.identity.model_files import ModelLoadError

if TYPE_CHECKING:
    from vllm.config import ModelConfig

#: vLLM's methods for scores from rows of the model's own head.
_TWO_WAYS, _EACH_TOKEN = "from_2_way_softmax", "no_post_processing"


def stored(folder: Path, model_config: ModelConfig) -> torch.nn.Linear:
    """Returns the layer `score` of a sequence-classification checkpoint in the head's dtype.

    Raises ModelLoadError: the layer is missing or malformed.
    """
    arrays = stored_arrays(folder)
    found = {name: array for name, array in arrays if name.startswith(OTHER_HEAD)}
    names = {name.removeprefix(OTHER_HEAD) for name in found}
    if "weight" not in names or not names <= {"weight", "bias"}:
        raise ModelLoadError(
            f"{folder} has no classification layer `score` with a weight and an optional bias (it "
            f"has {sorted(found) or 'no such tensors'}): use --convert embed, or a checkpoint made "
            "for sequence classification"
        )
    weight, bias = found[f"{OTHER_HEAD}weight"], found.get(f"{OTHER_HEAD}bias")
    # (number of labels, hidden size)
    expected = (model_config.hf_config.get_text_config().num_labels, model_config.get_hidden_size())
    if weight.shape != expected:
        raise ModelLoadError(
            f"score.weight in {folder} has shape {tuple(weight.shape)}, but config.json requires "
            f"{expected} (number of labels, hidden size)"
        )
    return torch_layers.linear(weight, bias).to(model_config.head_dtype)


def of_head(model: nn.Module, embedding: nn.Module, model_config: ModelConfig) -> torch.nn.Linear:
    """Makes a reranker's classifier from its head's rows for answer tokens ("no" and "yes").

    `classifier_from_token` of the configuration names the tokens.

    Raises ModelLoadError: a name is not a token of the tokenizer, or vLLM lacks the method.
    """
    tokens, method = _setting(model_config, "classifier_from_token"), asked(model_config)
    rows = head_rows(model, embedding, _token_ids(tokens, model_config))
    if method == _TWO_WAYS:
        # The softmax over two logits is the logistic function of their difference.
        rows = rows[1:] - rows[:1]
    elif method != _EACH_TOKEN:
        raise ModelLoadError(
            f"--hf-overrides with method={method!r} is not supported: choose {_TWO_WAYS!r} or "
            f"{_EACH_TOKEN!r}"
        )
    return torch_layers.linear(rows).to(model_config.head_dtype)


def asked(model_config: ModelConfig) -> str | None:
    """Returns the method that makes scores from the head's rows; None: there is a `score` layer."""
    return cast("str | None", _setting(model_config, "method"))


def _setting(model_config: ModelConfig, name: str) -> Any:
    """Reads a key of the model's configuration, or else of its text model's."""
    whole = model_config.hf_config
    return getattr(whole, name, None) or getattr(whole.get_text_config(), name, None)


def _token_ids(tokens: list[str], model_config: ModelConfig) -> list[int]:
    from vllm.tokenizers import get_tokenizer

    tokenizer: Any = get_tokenizer(
        model_config.tokenizer,
        revision=model_config.tokenizer_revision,
        tokenizer_mode=model_config.tokenizer_mode,
        trust_remote_code=model_config.trust_remote_code,
    )
    ids = [tokenizer.convert_tokens_to_ids(token) for token in tokens]
    unknown = [token for token, id_ in zip(tokens, ids, strict=True) if id_ is None]
    if unknown:
        raise ModelLoadError(
            f"classifier_from_token lists {unknown}, which the tokenizer does not have: correct it "
            "in --hf-overrides"
        )
    return ids
