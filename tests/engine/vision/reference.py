# SPDX-License-Identifier: Apache-2.0
"""transformers' answers about images, from a checkpoint's files alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engine.vision.checkpoints import Family
from PIL.Image import Image

from vllm_metal.patches.vllm_patches.image_processors import readable


def processor(folder: str | Path) -> Any:
    """Returns transformers' processor of a checkpoint."""
    import transformers

    with readable():
        return transformers.AutoProcessor.from_pretrained(folder)


def generated(
    folder: str | Path,
    family: Family,
    prompt: str,
    images: Sequence[Image],
    count: int,
    **videos: Any,
) -> tuple[list[int], list[int]]:
    """Returns the prompt's tokens as the processor expands it, and `count` greedy ones after it.

    Args:
        folder: folder of the checkpoint.
        family: family of the checkpoint.
        prompt: prompt with placeholders of images and videos.
        images: images of the prompt.
        count: number of tokens to generate.
        videos: videos in the processor's form; all their frames are read.
    """
    import transformers

    model = getattr(transformers, family.architecture).from_pretrained(folder, dtype=torch.float32)
    inputs = processor(folder)(
        text=[prompt],
        images=[list(images)] if images else None,
        add_special_tokens=False,
        return_tensors="pt",
        **(videos | {"do_sample_frames": False} if videos else {}),
    )
    lengths = {"max_new_tokens": count, "min_new_tokens": count}
    (made,) = model.eval().generate(**inputs, **lengths, do_sample=False).tolist()
    start = inputs["input_ids"].shape[1]
    return made[:start], made[start:]


def answer(
    folder: str | Path, family: Family, images: Sequence[Image], question: str, count: int
) -> tuple[list[int], list[int]]:
    """Returns a chat's tokens, with images before the question, and its answer's tokens."""
    tokenizer = processor(folder).tokenizer
    content: list[dict[str, str]] = [{"type": "image"} for _ in images]
    message = {"role": "user", "content": [*content, {"type": "text", "text": question}]}
    prompt = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return generated(folder, family, prompt, images, count)
