# SPDX-License-Identifier: Apache-2.0
"""Engines on published quantized weights, against transformers with the stored values.

A format of each kind of packing: scales as bytes, biases, experts, and a GGUF file.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from e2e.disk import HITS, disk_engine
from e2e.harness import counters, engine, generate, greedy, run_out
from e2e.test_quantized_cache import QuantizedDense
from engine.models.published import VOCAB, log_probabilities
from engine.weights.toys import DENSE, reference_of, reference_of_deepseek_v4, reference_of_gpt_oss
from transformers import AutoModelForCausalLM

from vllm_metal.engine.models.embedded import smollm2_gguf

pytestmark = pytest.mark.more

#: Largest gap of two log-probabilities that counts as a tie.
TIE = 1e-3
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_batched_tokens": 32,
    "kv_cache_memory_bytes": 8 << 20,
    "block_size": 16,
}
_GGUF = Path(__file__).parents[1] / "engine/weights/gguf/toys/qwen3.gguf"
FORMS = {
    "fp8 blocks of 128, powers of two": TIE,
    "fp8 blocks of 128": TIE,
    "compressed 4 bits, zeros": TIE,
    "gpt-oss": TIE,
    "DeepSeek V4": TIE,
    "GGUF": 0.03,
}
#: Weights that no MLX packing holds exactly are served in 8 bits with groups of 64.
ROUNDED = ["fp8 blocks of 128"]


def written(form: str, folder: Path) -> tuple[str, Any]:
    """Writes the model; returns transformers' model of its values."""
    if form == "gpt-oss":
        return str(folder), reference_of_gpt_oss(folder)
    if form == "DeepSeek V4":
        return str(folder), reference_of_deepseek_v4(folder)
    if form != "GGUF":
        reference = reference_of("llama", form, folder)
        if form in ROUNDED:
            round_linears(reference)
        return str(folder), reference
    file = smollm2_gguf()
    given: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.float32}
    return str(file), AutoModelForCausalLM.from_pretrained(str(file.parent), **given)


def round_linears(reference: Any) -> None:
    """Rounds quantized weights to 256 equal steps per group of 64."""
    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear) and not any(part in name for part in DENSE):
            groups = module.weight.data.unflatten(1, (-1, 64))
            low = groups.min(-1, keepdim=True).values
            step = (groups.max(-1, keepdim=True).values - low) / 255
            module.weight.data = (low + ((groups - low) / step).round() * step).flatten(1)


def prompts_of(count: int = 4) -> list[list[int]]:
    """Makes prompts that all share two blocks."""
    rng = np.random.default_rng(3)
    shared = rng.integers(3, VOCAB, 40).tolist()
    return [shared + rng.integers(3, VOCAB, 3 + 5 * n).tolist() for n in range(count)]


def check(reference: Any, prompts: list[list[int]], answers: list[list[int]], tie: float) -> None:
    """Asserts that each token is transformers' likeliest after its predecessors."""
    seen = set()
    for prompt, answer in zip(prompts, answers, strict=True):
        (rows,) = log_probabilities(reference, [[*prompt, *answer][:-1]])
        rows = rows[len(prompt) - 1 :]
        assert (rows.max(-1) - rows[np.arange(len(answer)), answer]).max() <= tie
        seen |= set(answer)
    assert len(seen) > 4, "the reference says the same whatever it reads"


@pytest.mark.parametrize(
    ("form", "ranks"),
    [
        *(
            pytest.param(form, 1, marks=pytest.mark.slow if form in ("GGUF", *ROUNDED) else ())
            for form in FORMS
        ),
        # Two ranks do not divide the heads of SmolLM2, nor groups of 64 in rows of 192.
        *(
            pytest.param(form, 2, marks=pytest.mark.slow)
            for form in FORMS
            if form not in ("GGUF", "DeepSeek V4", "fp8 blocks of 128")
        ),
    ],
)
def test_texts_and_prefix_hits(form: str, ranks: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("VLLM_METAL_CACHE", str(tmp_path / "cache"))
    (folder := tmp_path / "model").mkdir()
    model, reference = written(form, folder)
    prompts, seen = prompts_of(), []
    with engine(model, tensor_parallel_size=ranks, **OPTIONS) as llm:
        for _ in range(2):
            check(reference, prompts, generate(llm, prompts, greedy(12)), FORMS[form])
            seen.append(counters(llm)["vllm:prefix_cache_hits"])
    assert seen[1] > seen[0] and seen[1] >= 32 * len(prompts)


@pytest.mark.parametrize(
    ("form", "draft"),
    [
        ("fp8 blocks of 128, powers of two", "compressed 4 bits, zeros"),
        pytest.param("compressed 4 bits, zeros", "gptq 4 bits", marks=pytest.mark.slow),
        pytest.param("awq", "fp8 rows", marks=pytest.mark.slow),
    ],
)
def test_a_drafter_in_another_format(form: str, draft: str, tmp_path: Path) -> None:
    reference = reference_of("llama", form, tmp_path / "target")
    reference_of("llama", draft, tmp_path / "draft")
    drafting = {
        "method": "draft_model",
        "model": str(tmp_path / "draft"),
        "num_speculative_tokens": 3,
    }
    fixed = {"fixed_draft_length": True}
    options = OPTIONS | {"speculative_config": drafting, "additional_config": fixed}
    with engine(str(tmp_path / "target"), **options) as llm:
        check(reference, prompts_of(), generate(llm, prompts_of(), greedy(12)), TIE)
        found = counters(llm)
    accepted = found["vllm:spec_decode_num_accepted_tokens"]
    assert found["vllm:spec_decode_num_draft_tokens"] > accepted > 0


@pytest.mark.parametrize(
    "form",
    [
        "fp8 rows",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("compressed 4 bits, zeros", "gptq 4 bits")
        ),
    ],
)
def test_an_fp8_cache(form: str, tmp_path: Path) -> None:
    reference_of("llama", form, tmp_path)
    prompts = prompts_of()
    with engine(str(tmp_path), kv_cache_dtype="fp8", **OPTIONS) as llm:
        cold, warm = (generate(llm, prompts, greedy(8)) for _ in range(2))
        assert counters(llm)["vllm:prefix_cache_hits"] >= 32 * len(prompts)
    assert cold == warm
    dense = QuantizedDense(str(tmp_path), "fp8")
    for prompt, answer in zip(prompts, cold, strict=True):
        dense.check(prompt, answer)


def test_a_disk_cache_is_of_one_conversion(tmp_path: Path, monkeypatch: Any) -> None:
    """Another file, or another format under the same path, finds nothing."""
    monkeypatch.setenv("VLLM_METAL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    shutil.copy(_GGUF, file)
    forms = ("compressed 4 bits", "gptq 4 bits")
    for form in forms:
        reference_of("llama", form, tmp_path / form)
    prompts = prompts_of(1)

    def hits(model: Path, disk: str) -> float:
        with disk_engine(str(model), tmp_path / disk, **OPTIONS) as llm:
            generate(llm, prompts, greedy(2))
            run_out(llm)
            return counters(llm).get(HITS, 0)

    found = []
    for inexact in ("8bit", "dense", "8bit", "dense"):
        monkeypatch.setenv("VLLM_METAL_GGUF_INEXACT", inexact)
        found.append(hits(file, "of a file"))
    assert found == [0, 0, 32, 32]
    found = []
    for form in (*forms, *forms):
        shutil.rmtree(tmp_path / "served", ignore_errors=True)
        shutil.copytree(tmp_path / form, tmp_path / "served")
        found.append(hits(tmp_path / "served", "of a folder"))
    assert found == [0, 0, 32, 32]
