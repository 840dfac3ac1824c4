# SPDX-License-Identifier: Apache-2.0
"""Every vLLM environment variable is honored, has no meaning here, or is rejected."""

from types import SimpleNamespace

import pytest
from vllm import SamplingParams, envs
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm_settings.configured import configure
from vllm_settings.row import differences, of_kind
from vllm_settings.variables import TABLE

from vllm_metal.platform.refused_variables import REFUSED_VARIABLES
from vllm_metal.settings.envs import NAMES

#: A value that each refused variable is refused for.
REFUSED = {
    "VLLM_BATCH_INVARIANT": "1",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_FLOAT32_MATMUL_PRECISION": "high",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random",
    "VLLM_KV_CACHE_LAYOUT": "HND",
    "VLLM_USE_MODELSCOPE": "1",
    "VLLM_USE_RUST_FRONTEND": "1",
}
#: A tokenizer of one token a letter.
LETTERS = SimpleNamespace(
    encode=lambda text, add_special_tokens: list(text.strip().encode()), max_token_id=255
)


def test_every_variable_has_a_row_and_a_case():
    lacking, unknown = differences(TABLE, envs.environment_variables.keys() - set(NAMES))
    assert not lacking, f"say in tests/vllm_settings/variables.py what becomes of {lacking}"
    assert not unknown, f"vLLM has no such variables: {unknown}"
    assert set(of_kind(TABLE, "refused")) == REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_variable_is_named(folder, monkeypatch, name):
    monkeypatch.setenv(name, REFUSED[name])
    with pytest.raises(ValueError, match=f"vllm-metal does not support {name}"):
        configure(folder)


@pytest.mark.parametrize("name", REFUSED_VARIABLES)
def test_a_value_that_asks_for_nothing_is_not_refused(folder, monkeypatch, name):
    off, _ = REFUSED_VARIABLES[name]
    monkeypatch.delenv(name, raising=False)
    configure(folder)
    if off is not None:
        monkeypatch.setenv(name, str(int(off) if isinstance(off, bool) else off))
        configure(folder)


@pytest.mark.parametrize(
    ("name", "low", "high", "ask"),
    [
        ("VLLM_MAX_N_SEQUENCES", "2", "3", lambda folder: SamplingParams(n=3)),
        (
            "VLLM_MAX_NUM_BAD_WORDS",
            *("1", "2"),
            lambda folder: SamplingParams(bad_words=["a", "b"]).update_from_tokenizer(LETTERS),
        ),
        (
            "VLLM_MAX_COMPLETION_PROMPTS",
            *("1", "2"),
            lambda folder: CompletionRequest(prompt=["a", "b"]),
        ),
        (
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
            *("0", "1"),
            lambda folder: configure(folder, max_model_len=1024),
        ),
    ],
)
def test_a_limit_is_what_the_variable_says(folder, monkeypatch, name, low, high, ask):
    monkeypatch.setenv(name, high)
    ask(folder)
    monkeypatch.setenv(name, low)
    with pytest.raises((ValueError, VLLMValidationError), match=f"{name}|Too many bad words"):
        ask(folder)
