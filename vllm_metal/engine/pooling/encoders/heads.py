# SPDX-License-Identifier: Apache-2.0
"""Creates torch heads that score pooled hidden states, for vLLM's poolers."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import torch

from vllm_metal.engine.pooling import torch_layers
from vllm_metal.engine.weights.layers import dense_rows


def of_bert(model: Any) -> torch.nn.Module:
    """Returns the pooler's dense layer and BERT's classifier as one: [R, H] to [R, labels]."""
    return torch.nn.Sequential(
        _linear(model.pooler.dense), torch.nn.Tanh(), _linear(model.classifier)
    )


def of_roberta(model: Any) -> torch.nn.Module:
    """Returns RoBERTa's head: its classifier's two layers; [R, H] to [R, labels]."""
    head = model.classifier
    return torch.nn.Sequential(_linear(head.dense), torch.nn.Tanh(), _linear(head.out_proj))


def of_modernbert(model: Any) -> torch.nn.Module:
    """Returns ModernBERT's head: a layer, a norm, then labels; [R, H] to [R, labels]."""
    dense, norm, labels = model.head.dense, model.head.norm, model.classifier
    return torch.nn.Sequential(_linear(dense), torch.nn.GELU(), _norm(norm), _linear(labels))


def _linear(layer: nn.Module) -> torch.nn.Linear:
    return torch_layers.linear(dense_rows(layer), layer.get("bias"))


def _norm(layer: Any) -> torch.nn.LayerNorm:
    return torch_layers.layer_norm(layer.weight, layer.get("bias"), layer.eps)
