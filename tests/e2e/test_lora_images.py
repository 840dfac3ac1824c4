# SPDX-License-Identifier: Apache-2.0
"""Adapters for the text layers of multimodal models, against PEFT's model."""

import numpy as np
import pytest
import torch
import transformers
from e2e.harness import engine, greedy
from e2e.test_lora import named, tokens
from engine.vision import checkpoints
from engine.vision.reference import processor
from peft import LoraConfig, get_peft_model
from PIL import Image

from vllm_metal.engine.vision.families import FAMILIES

pytestmark = pytest.mark.more
NUM_TOKENS = 12
NO_TOKEN = 10**6
#: Inkling's projections of queries, keys and values are one layer, which rejects adapters.
WITHOUT = {"inkling_mm_model"}
#: What PEFT updates: projections of the text, and of the tower too.
TEXT = r".*language_model.*\.(q|v|up|down)_proj"
TOWER = TEXT + r"|.*(visual|vision_tower|vision_model).*\.(qkv|q_proj|linear_fc1|fc1)"
TOWERS = {"gemma4": TEXT + r"|.*vision_tower.*\.q_proj\.linear"}  # whose linears are wrapped


def adapted(family, folder, seed, modules, to):
    """Writes an adapter; returns PEFT's model with it."""
    torch.manual_seed(seed)
    model = getattr(transformers, family.architecture).from_pretrained(folder, dtype=torch.float32)
    settings = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "target_modules": modules}
    made = get_peft_model(model.eval(), LoraConfig(**settings)).eval()
    made.save_pretrained(to)
    return made


def answers(model, folder, text, images):
    """Generates with transformers."""
    inputs = processor(folder)(text=[text], images=[images], return_tensors="pt")
    lengths = {"max_new_tokens": NUM_TOKENS, "eos_token_id": NO_TOKEN}  # the end is a token as any
    with torch.inference_mode():
        found = model.generate(**inputs, **lengths, do_sample=False)
    return found[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "qwen3_vl" else pytest.mark.slow)
        for name in sorted((FAMILIES.keys() & checkpoints.FAMILIES.keys()) - WITHOUT)
    ],
)
def test_adapters_of_the_texts_layers(tmp_path, name):
    family, base = checkpoints.FAMILIES[name], tmp_path / "base"
    family.write(base)
    pixels = np.random.default_rng(0).integers(0, 255, (96, 96, 3), dtype=np.uint8)
    image, text = Image.fromarray(pixels), f"see {family.image} tell"
    folders = [tmp_path / "1", tmp_path / "2"]
    models = [adapted(family, base, n, TEXT, folder) for n, folder in enumerate(folders, 1)]
    plain = getattr(transformers, family.architecture).from_pretrained(base, dtype=torch.float32)
    expected = [answers(model, base, text, [image]) for model in (*models, plain.eval())]
    assert len({tuple(each) for each in expected}) == 3
    adapted(family, base, 3, TOWERS.get(name, TOWER), tmp_path / "tower")
    asked = {"prompt": text, "multi_modal_data": {"image": [image]}}
    requests = [*(named(n, folder) for n, folder in enumerate(folders, 1)), None]
    with engine(
        str(base),
        max_model_len=256,
        max_num_batched_tokens=80,
        max_num_seqs=4,
        kv_cache_memory_bytes=16 << 20,
        dtype="float32",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
    ) as llm:
        outputs = llm.generate(
            [asked] * 3, greedy(NUM_TOKENS), use_tqdm=False, lora_request=requests
        )
        assert tokens(outputs) == expected
        again = llm.generate([asked], greedy(NUM_TOKENS), use_tqdm=False, lora_request=requests[:1])
        assert tokens(again) == expected[:1]
        with pytest.raises(ValueError, match=r"'adapter-3' updates .*(visual|vision_|multi_modal)"):
            llm.llm_engine.add_lora(named(3, tmp_path / "tower"))
