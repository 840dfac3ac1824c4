# SPDX-License-Identifier: Apache-2.0
"""Engines that read images: tokens equal transformers', whatever is cached, cut or drafted."""

import numpy as np
import pytest
import torch
import transformers
from e2e.harness import counters, engine, greedy
from engine.models.cases import cases
from engine.vision import checkpoints
from PIL import Image

from vllm_metal.engine.vision.families import FAMILIES

NUM_TOKENS = 24
#: As many as the encoder cache must hold of the families whose images are smallest.
NUM_BATCHED_TOKENS = {"gemma4": 144, "llava": 144}  # all others' are of 34 at most
#: Image tokens read the row of the padding token.
ADDITIONAL = {"gemma4": {"embedding_tables": "disk"}}
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}


@pytest.fixture(
    scope="module",
    # Beside the first one, images whose rows see each other, and layers with states.
    params=cases(
        sorted(FAMILIES.keys() & checkpoints.FAMILIES.keys()),
        ["qwen3_vl"],
        ["gemma3", "inkling_mm_model", "qwen3_5"],
    ),
)
def asked(request, tmp_path_factory):
    """A family's checkpoint, and prompts with images by the same name in several of them."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    family = checkpoints.FAMILIES[name]
    family.write(folder, few=True)
    rng = np.random.default_rng(0)
    wide, tall = (
        Image.fromarray(rng.integers(0, 255, (*shape, 3), dtype=np.uint8))
        for shape in ((96, 192), (96, 64))
    )
    word = "tell tell tell "
    prompts = [
        {"prompt": f"see {family.image} {word}", "multi_modal_data": {"image": [wide]}},
        {
            "prompt": f"{word}{family.image} and {family.image} {word}",
            "multi_modal_data": {"image": [tall, wide]},
        },
        {"prompt": word},
    ]
    options = {"additional_config": ADDITIONAL.get(name, {})} | family.options
    return (
        family,
        folder,
        prompts,
        options | {"max_num_batched_tokens": NUM_BATCHED_TOKENS.get(name, 34)},
    )


def expected(family, folder, prompts):
    """Ids of each prompt, and what transformers' model says."""
    model = getattr(transformers, family.architecture).from_pretrained(folder, dtype=torch.float32)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    for prompt in prompts:
        images = prompt.get("multi_modal_data", {}).get("image")
        text = family.for_transformers(prompt["prompt"])
        inputs = processor(text=text, images=images, return_tensors="pt")
        if family.rounds_pixels and images:
            inputs["pixel_values"] = inputs["pixel_values"].bfloat16().float()
        with torch.inference_mode():
            found = model.eval().generate(
                **inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
            )
        count = inputs["input_ids"].shape[1]
        yield inputs["input_ids"][0].tolist(), found[0, count:].tolist()


@pytest.mark.usefixtures("unfused")
def test_tokens_equal_those_of_transformers_with_drafts_and_cached_prefixes(asked, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    family, folder, prompts, options = asked
    with engine(
        str(folder),
        max_model_len=512,
        max_num_seqs=4,
        dtype="float32",
        speculative_config=DRAFTS,
        **options,
    ) as llm:
        first = llm.generate(prompts, greedy(NUM_TOKENS), use_tqdm=False)
        again = llm.generate(prompts[:2], greedy(NUM_TOKENS), use_tqdm=False)
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        found, block_size = counters(llm), llm.llm_engine.vllm_config.cache_config.block_size
        encoder = worker.networks.encoder
        assert encoder.num_encoded == found["vllm:metal_images_encoded"] == 2
        assert worker.networks.image_bytes(worker.vllm_config) > encoder.nbytes > 0
        worker.reset_encoder_cache()
        assert encoder.nbytes == 0
    wanted = list(expected(family, folder, prompts))
    for (ids, tokens), output in zip([*wanted, *wanted[:2]], [*first, *again], strict=True):
        assert output.prompt_token_ids == ids
        assert list(output.outputs[0].token_ids) == tokens
    for output in again:  # blocks that have room for a state are larger than these prompts
        whole = (len(output.prompt_token_ids) - 1) // block_size * block_size
        assert output.num_cached_tokens == whole
    assert found["vllm:spec_decode_num_accepted_tokens"] > 0
