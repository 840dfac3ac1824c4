# SPDX-License-Identifier: Apache-2.0
"""Inkling as written by transformers, with and without towers: equal text."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from e2e.harness import greedy
from e2e.test_hybrids import NGRAM, check_passes, hybrid_engine
from e2e.test_transformers import Transformers
from engine.models.of_mlx_vlm import INKLING
from engine.models.published import draw, log_probabilities
from mlx.nn import log_softmax
from own_configs import own_config
from PIL import Image
from transformers import InklingForCausalLM, InklingForConditionalGeneration

from vllm_metal.engine.models.loader import lazy_model

pytestmark = pytest.mark.more

#: A bias that ends amid the prompts, and a head with padding; transformers' names of MLP widths.
TEXT = INKLING | {
    "vocab_size": 72,
    "unpadded_vocab_size": 64,
    "sliding_window_size": 19,
    "rel_extent": 45,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWERS = {
    "vision_config": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8},
    "image_token_id": 60,
    "audio_token_id": 61,
    "image_bos_token_id": 62,
    "audio_bos_token_id": 63,
}
#: vLLM's renderer of chats for Inkling needs a tokenizer, and its processor of images, too.
WITHOUT_TOKENIZER = {"tokenizer_mode": "hf", "language_model_only": True}
CLASSES = {
    "inkling_text": InklingForCausalLM,
    "inkling_mm_model": InklingForConditionalGeneration,
}


def written(kind: str, folder) -> str:
    """Writes a float32 folder with transformers, with varied texts."""
    content = TEXT if kind == "inkling_text" else {"text_config": TEXT, **TOWERS}
    model = CLASSES[kind](own_config(kind, **content)).float().eval()
    draw(model, torch.Generator().manual_seed(4))
    model.save_pretrained(folder)
    return str(folder)


@dataclass
class Inkling(Transformers):
    """transformers' forward of a whole text; it has no fused attention with a bias."""

    def __post_init__(self) -> None:
        given = {"dtype": torch.float32, "attn_implementation": "eager"}
        cls = CLASSES[Path(self.path).name]
        self.model = self._model = cls.from_pretrained(self.path, **given).eval()
        self._known: set[tuple[int, ...]] = set()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inkling")
    return {kind: written(kind, folder / kind) for kind in CLASSES}


@pytest.mark.parametrize("kind", list(CLASSES))
def test_log_probabilities_are_transformers(folders, kind):
    (prompt,) = np.random.default_rng(2).integers(3, 60, (1, 130)).tolist()
    (expected,) = log_probabilities(Inkling(folders[kind]).model, [prompt])
    found = log_softmax(lazy_model(Path(folders[kind]), mx.float32)(mx.array([prompt])))
    np.testing.assert_allclose(np.array(found[0]), expected, atol=1e-3)
    assert expected.std() > 1


@pytest.mark.parametrize("kind", list(CLASSES))
def test_hits_drafts_and_preemptions(folders, kind):
    """The pool has blocks for a few of the requests, and few drafts are right."""
    first, second = check_passes(
        folders[kind],
        judge=Inkling,
        num_gpu_blocks_override=110,
        speculative_config=NGRAM,
        **WITHOUT_TOKENIZER,
    )
    assert 0 < first["vllm:prefix_cache_hits"] < second["vllm:prefix_cache_hits"]
    assert second["vllm:num_preemptions"] > 0
    # Drafts were rejected at each of their places.
    per_place = [
        second["vllm:spec_decode_num_drafts"],
        *(second[f"vllm:spec_decode_num_accepted_tokens_per_pos:{place}"] for place in range(3)),
    ]
    assert all(later < before for before, later in pairwise(per_place)) and per_place[-1] > 0


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 7, 512])
def test_chunks(folders, chunk):
    """Prompts come in chunks that end anywhere, or as one; contexts on both sides of window and
    extent share steps."""
    (after,) = check_passes(
        folders["inkling_text"],
        passes=1,
        count=3 if chunk == 1 else 12,
        judge=Inkling,
        max_num_batched_tokens=chunk,
        max_num_seqs=min(chunk, 32),
        **WITHOUT_TOKENIZER,
    )
    assert after["vllm:prefix_cache_hits"] > 0 or chunk != 7


def test_text_alone_takes_no_images(folders):
    image = {"image": Image.new("RGB", (40, 40))}
    with hybrid_engine(folders["inkling_mm_model"], **WITHOUT_TOKENIZER) as llm:
        prompt = {"prompt_token_ids": [1, 2, TOWERS["image_token_id"]], "multi_modal_data": image}
        with pytest.raises(ValueError, match="text-only"):
            llm.generate([prompt], greedy(2, detokenize=False))
