# SPDX-License-Identifier: Apache-2.0
"""The small models see: each key of a configuration and each array counts, or is listed here.

A family is blind to a key where transformers' own log-probabilities stay as they are when it
changes. No comparison could then tell whether ours reads it.
"""

from fnmatch import fnmatch

import numpy as np
import pytest
import torch
from models.changed import of_text, shapes, toy
from models.published import FAMILIES
from models.test_published_config import TOLERANCE

#: Of log-probabilities: what a change must do to be seen.
SEEN = 100 * TOLERANCE
OTHER_ARRAYS = float("inf")  # of other shapes or names, so that files themselves would differ


def _names(words):
    return frozenset(words.split())


#: Keys that change nothing of what any family's class computes, by reason.
WITHOUT_EFFECT = {
    "training": _names(
        "attention_dropout attn_pdrop classifier_dropout embd_pdrop emb_pdrop embedding_dropout "
        "hidden_dropout resid_pdrop residual_dropout summary_first_dropout initializer_range "
        "router_aux_loss_coef router_jitter_noise input_jitter_noise w_init_variance_scale "
        "final_w_init_variance_scale rescale_prenorm_residual time_step_init_scheme "
        "time_step_scale linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max "
        "linear_dt_min moe_jitter_eps moe_loss_weight"
    ),
    "tokens": _names("bos_token_id eos_token_id pad_token_id eod_token_id"),
    "what else is returned": _names(
        "output_attentions output_hidden_states output_router_logits problem_type use_cache "
        "id2label label2id num_logits_to_keep"
    ),
    "other heads than that of the next token": _names(
        "summary_type summary_use_proj summary_activation summary_proj_to_labels"
    ),
    "how it is computed": _names(
        "chunk_size chunk_size_feed_forward mamba_chunk_size pretraining_tp use_associative_scan use_mamba_kernels use_mambapy "
        "residual_in_fp32 mamba_ssm_cache_dtype moe_shared_expert_overlap reorder_and_upcast_attn "
        "attention_softmax_in_fp32 scale_attention_softmax_in_fp32"
    ),
    "a decoder is a decoder": _names("is_decoder is_encoder_decoder"),
    "the longest text, which is vLLM's to limit": _names(
        "max_position_embeddings max_seq_len model_max_length"
    ),
    "layers that draft, which transformers does not build": _names(
        "num_nextn_predict_layers mtp_layers_block_type"
    ),
}
GENERAL = frozenset().union(*WITHOUT_EFFECT.values())
#: The same of single families, by pattern of `family:key`, with the reason.
OF_FAMILY: dict[str, str] = {}
#: Patterns of `family:array` that change nothing, with the reason.
ARRAYS: dict[str, str] = {}


def listed(table, name):
    return any(fnmatch(name, pattern) for pattern in table)


@pytest.fixture
def original(request, tmp_path):
    return toy(request.param, tmp_path / "published")


def seen(original, model):
    """The largest difference of log-probabilities."""
    if shapes(model) != shapes(original.model):
        return OTHER_ARRAYS
    return float(np.abs(of_text(model) - original.expected).max())


def effects(original):
    """By key, the largest of its changes; None where transformers has no such model."""
    found = {}
    for change in original.changes():
        if change.added:
            continue
        try:
            effect = seen(original, original.changed(change))
        except Exception:
            found.setdefault(change.key, None)
            continue
        if np.isfinite(effect) or effect == OTHER_ARRAYS:
            found[change.key] = max(effect, found.get(change.key) or 0.0)
    return found


QUICK = ("granite",)
NAMES = [
    *QUICK,
    *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in QUICK),
]


@pytest.mark.parametrize("original", NAMES, indirect=True)
def test_each_key_counts_or_is_listed(original):
    wrong = {}
    for key, effect in effects(original).items():
        last = key.rpartition(".")[2]
        silent = last in GENERAL or listed(OF_FAMILY, f"{original.name}:{key}")
        if silent and effect is not None and effect > TOLERANCE:
            wrong[key] = f"is listed, and changes {effect:.2g}"
        if not silent and effect is None:
            wrong[key] = "no change of it is a model"
        if not silent and effect is not None and effect < SEEN:
            wrong[key] = f"changes {effect:.2g} only"
    assert not wrong, "\n".join(f"{original.name}:{key} {why}" for key, why in wrong.items())


def arrays(model):
    """Its parameters and the buffers that are in files, by name."""
    files = model.state_dict()
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    for name, array in (*model.named_parameters(), *model.named_buffers()):
        if name in files and array.is_floating_point() and name not in tied:
            yield name, array


@pytest.mark.parametrize("original", NAMES, indirect=True)
def test_each_array_counts_or_is_listed(original):
    wrong, generator = {}, torch.Generator().manual_seed(1)
    base = original.expected
    for name, array in arrays(original.model):
        before = array.data.clone()
        noise = torch.randn(array.shape, generator=generator)
        array.data = before + noise * max(before.std().item() if before.numel() > 1 else 0, 0.2)
        effect = float(np.abs(of_text(original.model) - base).max())
        array.data = before
        silent = listed(ARRAYS, f"{original.name}:{name}")
        if silent and effect > TOLERANCE:
            wrong[name] = f"is listed, and changes {effect:.2g}"
        if not silent and effect < SEEN:
            wrong[name] = f"changes {effect:.2g} only"
    assert not wrong, "\n".join(f"{original.name}:{name} {why}" for name, why in wrong.items())
