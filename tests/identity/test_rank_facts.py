# SPDX-License-Identifier: Apache-2.0
"""Ranks' facts show differences that would change tokens."""

import json

import mlx.core as mx
import pytest
from patches.vllm_patches import doubles
from vllm_settings.configured import configure

from vllm_metal.identity import rank_facts


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Makes a folder; its path does not matter."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def made(name, seed=0, **changes):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(doubles.MODEL | changes))
        weights = {"model.norm.weight": mx.full((64,), seed)}
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
        return str(folder)

    return made


def difference(folder, other, **options):
    ours = rank_facts.of(configure(folder))
    theirs = rank_facts.of(configure(other, **options))
    assert json.loads(json.dumps(ours)) == ours
    return rank_facts.difference(ours, theirs)


def test_the_same_model_in_another_folder_is_the_same(model):
    assert difference(model("a"), model("b")) == ""


def test_what_changes_tokens_is_named(model):
    a = model("a")
    assert "weights of the target differ" in difference(a, model("b", seed=1))
    assert "hf_config differ" in difference(a, model("c", rms_norm_eps=1e-3))
    assert "kv_cache_dtype fp8_per_token_head, here auto" in difference(a, a, kv_cache_dtype="fp8")
    assert "dtype bfloat16, here float32" in difference(a, a, dtype="bfloat16")
