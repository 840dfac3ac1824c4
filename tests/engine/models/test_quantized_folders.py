# SPDX-License-Identifier: Apache-2.0
"""Folders converted by mlx-lm compute the same as transformers with their weights.

mlx-lm writes its own names of arrays, and what `sanitize` made of them: a patch of ours that mends
published files must know such folders.
"""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from engine.models.converted import convert, rounded
from engine.models.published import FAMILIES, VOCAB, log_probabilities, make, write
from engine.models.test_executor import chunk_by_chunk, of_states

from vllm_metal.engine.config_json.ropes import fit_context
from vllm_metal.engine.models.loader import lazy_model

pytestmark = pytest.mark.usefixtures("unfused")

TOLERANCE = 1e-3  # of log-probabilities in float32
#: Sizes that a group of weights divides.
SIZES = {"hidden_size": 96, "intermediate_size": 128, "moe_intermediate_size": 64}
CHANGES = {
    "falcon_h1": {  # mlx-lm multiplies no biases, and refuses nothing
        "attention_in_multiplier": 1.0,
        "attention_bias": False,
        "mlp_bias": False,
        "projectors_bias": False,
        "mamba_proj_bias": False,
    },
    "granitemoehybrid": {"mamba_n_heads": 8},
    "mixtral": {"head_dim": 16},
    "recurrent_gemma": {"lru_width": 96},
}
#: Different kinds, and all modules with patched file reading.
NAMES = (
    "llama",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "glm4_moe_lite",
    "qwen3_next",
    "falcon_h1",
    "granitemoehybrid",
    "gpt_oss",
    "gpt2",
    "jamba",
    "kimi_linear",
    "olmo_hybrid",
    "recurrent_gemma",
)
#: Bits of a weight, by a name that stands in transformers' and in mlx-lm's.
KINDS = {
    "as they are": None,
    "4 bits": lambda name: 4,
    "8 bits": lambda name: 8,
    "mixed": lambda name: 8 if "down_proj" in name or "o_proj" in name else 4,
}
#: The published folder differs from transformers' forward by the same amount, to the bit.
FAR = (("qwen3_next", "4 bits"), ("qwen3_next", "mixed"))
QUICK = ("llama", "mixed")
MORE = ("falcon_h1", "as they are")
CASES = [
    pytest.param(
        *case, marks=() if case == QUICK else pytest.mark.more if case == MORE else pytest.mark.slow
    )
    for case in itertools.product(NAMES, KINDS)
    if case not in FAR
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_folder_that_mlx_lm_wrote_computes_what_transformers_does(name, kind, tmp_path):
    family, bits_of = FAMILIES[name], KINDS[kind]
    sizes = SIZES if family.common else {"n_embd": 96, "n_inner": 384}
    model = make(family, **(sizes | CHANGES.get(name, {})))
    if bits_of is not None:
        rounded(model, bits_of)
    write(model, tmp_path / "published")
    folder = convert(tmp_path / "published", tmp_path / "converted", name, bits_of)
    ours = lazy_model(folder, mx.float32)
    if bits_of is not None:
        assert any("scales" in module for _, module in ours.named_modules())
    fit_context(ours, 128)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, VOCAB, n).tolist() for n in (50, 33, 1, 40)]
    expected = log_probabilities(model, prompts)
    assert len(set(np.concatenate(expected).argmax(-1).tolist())) > 8
    blocks = np.random.default_rng(5).permutation(np.arange(1, 40))
    parts = chunk_by_chunk(ours, name, prompts, blocks, of_states)
    for one, other in zip(parts, expected, strict=True):
        logits = np.concatenate([np.array(part, np.float32) for part in one])
        logits -= logits.max(-1, keepdims=True)
        found = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert np.abs(found - other).max() <= TOLERANCE
