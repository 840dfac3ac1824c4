# SPDX-License-Identifier: Apache-2.0
"""Judges a script checkpoint's output with transformers."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Said:
    """Generates with transformers' model of a folder."""

    def __init__(self, folder: Path):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def __call__(self, messages: list[dict[str, str]]) -> str:
        """Returns the greedy answer to a conversation."""
        ids = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            out = self.model.generate(**ids, max_new_tokens=400, do_sample=False)
        return self.tokenizer.decode(
            out[0, ids["input_ids"].shape[1] :].tolist(), skip_special_tokens=True
        )


def asked(text: str, results: int = 0, filler: str = "") -> list[dict[str, str]]:
    """Makes a conversation with the given tool results."""
    history = [{"role": "user", "content": text}]
    for number in range(results):
        history += [
            {"role": "assistant", "content": f"Step {number}."},
            {"role": "tool", "content": f"result {number} {filler}"},
        ]
    return history
