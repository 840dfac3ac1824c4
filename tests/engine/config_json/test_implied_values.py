# SPDX-License-Identifier: Apache-2.0
"""Keys whose values follow from others."""

import pytest

from vllm_metal.engine.config_json import implied_values


def test_a_config_notes_what_it_was_asked_for():
    asked = implied_values.Asked({"a": 1, "b": 2})
    assert asked.get("a") == 1
    assert asked.get("c") is None
    assert asked.keys_asked == {"a", "c"}


@pytest.mark.parametrize(
    ("config", "module", "key", "sources"),
    [
        ({"n_embd": 4, "n_inner": 16}, "gpt2", "n_inner", ("n_embd",)),
        ({"hidden_size": 4}, "llama", "head_dim", ("hidden_size",)),  # the heads are not there
        ({"rms_norm_eps": 1e-5}, "llama", "rms_norm_eps", ()),
    ],
)
def test_the_keys_that_a_value_follows_from(config, module, key, sources):
    assert implied_values.sources(config, module, key) == sources
