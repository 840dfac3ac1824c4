# SPDX-License-Identifier: Apache-2.0
"""Every tensor of a folder is used, known to have no effect, or an error."""

import json

import mlx.core as mx
import numpy as np
import pytest
from engine.config_json.test_published_config import NOT_READ, TOLERANCE, ours, tokens
from engine.models.cases import cases
from engine.models.published import FAMILIES, log_probabilities, make, write
from mlx.utils import tree_flatten

from vllm_metal.engine.models import leftovers
from vllm_metal.engine.models.loader import dense_model
from vllm_metal.identity.model_files import ModelLoadError

pytestmark = pytest.mark.usefixtures("unfused")

KEY = "tie_word_embeddings"
#: Or their heads have other names, or mlx-vlm's module has a head of its own in any case.
NEVER_TIED = ("dbrx", "deepseek_v4", "gpt_neox", "gpt_neox, one after another", "minimax_m3_vl")
READ = [name for name in FAMILIES if name not in NOT_READ]


def expected(model):
    (found,) = log_probabilities(model, [tokens()])
    return found


def arrays_of(folder):
    (path,) = folder.glob("model*.safetensors")
    return path, dict(mx.load(str(path)))


def add(folder, added):
    path, arrays = arrays_of(folder)
    mx.eval(arrays)
    mx.save_safetensors(str(path), arrays | added, {"format": "pt"})


def say(folder, **keys):
    """Changes config.json; None removes a key."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


EMBEDDINGS = tuple(f"{name}.weight" for name in ("embed_tokens", "wte", "embeddings", "embed_in"))


def has_head(folder):
    return any(name.endswith("lm_head.weight") for name in arrays_of(folder)[1])


@pytest.mark.parametrize("stated", [None, True], ids=["absent", "tied"])
@pytest.mark.parametrize("name", cases(READ, ["llama", "granite"], ["qwen2_moe", "olmo2"]))
def test_a_head_of_its_own_counts_whatever_config_json_says(name, stated, tmp_path):
    model = make(FAMILIES[name])
    write(model, tmp_path)
    if not has_head(tmp_path):
        pytest.skip("transformers' class has no head, or by another name")
    say(tmp_path, **{KEY: stated})
    assert np.abs(ours(tmp_path, tokens()) - expected(model)).max() <= TOLERANCE


@pytest.mark.parametrize("name", cases(READ, ["llama"], ["qwen3_moe", "gemma2"]))
def test_a_copy_of_the_embedding_is_no_head(name, tmp_path):
    if name in NEVER_TIED:
        pytest.skip("transformers' class ties nothing")
    model = make(FAMILIES[name], tie_word_embeddings=True)
    write(model, tmp_path)
    _, arrays = arrays_of(tmp_path)
    if has_head(tmp_path):
        pytest.skip("transformers' class ties nothing")
    (embedding,) = (
        name for name in arrays if name.endswith(EMBEDDINGS) and "per_layer" not in name
    )
    add(tmp_path, {"lm_head.weight": arrays[embedding]})
    parameters = tree_flatten(dense_model(tmp_path).parameters())
    assert not any("lm_head" in name for name, _ in parameters)  # it takes no memory of its own
    assert np.abs(ours(tmp_path, tokens()) - expected(model)).max() <= TOLERANCE


def test_without_a_head_and_a_word_on_it_the_embedding_is_the_head(tmp_path):
    model = make(FAMILIES["llama"], tie_word_embeddings=True)
    write(model, tmp_path)
    say(tmp_path, **{KEY: None})
    assert np.abs(ours(tmp_path, tokens()) - expected(model)).max() <= TOLERANCE


def test_a_head_that_the_module_has_no_place_for_is_an_error(tmp_path):
    model = make(FAMILIES["gemma2"])
    write(model, tmp_path)
    _, arrays = arrays_of(tmp_path)
    add(tmp_path, {"lm_head.weight": arrays["model.embed_tokens.weight"] * 2})
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight"):
        ours(tmp_path, tokens())


ONE = mx.ones((1,))
#: Names of tensors beside those of a Llama, and the reason why they compute nothing.
BESIDE = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": "rotary",
    "mtp.layers.0.self_attn.q_proj.weight": "draft",
    "vision_tower.patch_embed.weight": "images",
    "model.layers.1.self_attn.k_scale": "KV cache",
    "model.layers.0.self_attn.masked_bias": "masks",
}


def test_tensors_that_compute_nothing_are_counted_by_reason(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(leftovers.logger, "info", lines.append)
    model = make(FAMILIES["llama"])
    write(model, tmp_path)
    own = len(arrays_of(tmp_path)[1])
    add(tmp_path, dict.fromkeys(BESIDE, ONE))
    assert np.abs(ours(tmp_path, tokens()) - expected(model)).max() <= TOLERANCE
    (line,) = lines
    assert f"{own} in parameters, {len(BESIDE)} left out" in line and "0 unknown" in line
    assert all(reason in line for reason in BESIDE.values())


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("llama", "model.layers.0.self_attn.q_gain"),
        ("deepseek_v3", "model.layers.61.self_attn.q_proj.weight"),  # dropped by the module
        ("glm4_moe", "model.layers.4.mlp.gate.weight"),
    ],
)
def test_an_unknown_tensor_is_an_error(name, tensor, tmp_path):
    write(make(FAMILIES[name]), tmp_path)
    add(tmp_path, {tensor: ONE})
    with pytest.raises(ModelLoadError, match=r"tensors of the checkpoint|not in model"):
        ours(tmp_path, tokens())


def test_layers_that_draft_are_known_by_what_they_have(tmp_path):
    model = make(FAMILIES["deepseek_v3"])
    write(model, tmp_path)
    add(tmp_path, {f"model.layers.9.{part}": ONE for part in ("enorm.weight", "mlp.gate.weight")})
    assert np.abs(ours(tmp_path, tokens()) - expected(model)).max() <= TOLERANCE
