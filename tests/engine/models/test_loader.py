# SPDX-License-Identifier: Apache-2.0
"""Loading plain, MLX-quantized and broken model folders."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import load_model
from vllm.engine.arg_utils import EngineArgs

from vllm_metal.engine.models import loader, parts
from vllm_metal.engine.spec_decode.registry import load_network

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def write(folder, quantization=None, **changes):
    """Writes a model folder with random weights in MLX's layout."""
    config = CONFIG | changes
    mx.random.seed(1)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    if quantization is not None:
        nn.quantize(model, **quantization)
        # mlx-lm's own converter writes both names.
        config |= {"quantization": quantization, "quantization_config": quantization}
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder, **options):
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=128, **options)
    return loader.load(args.create_engine_config())


def logits(model):
    return np.array(model(mx.arange(7)[None]).astype(mx.float32))


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_plain_and_quantized_weights_give_mlx_lms_logits(tmp_path, bits):
    write(tmp_path, None if bits is None else {"group_size": 32, "bits": bits})
    model = load(tmp_path)
    reference, _ = load_model(tmp_path)
    reference.set_dtype(mx.float32)
    np.testing.assert_allclose(logits(model), logits(reference), atol=1e-5)
    dtypes = {array.dtype for _, array in tree_flatten(model.parameters())}
    assert dtypes == ({mx.float32} if bits is None else {mx.float32, mx.uint32})


@pytest.mark.parametrize(
    ("overrides", "in_config"),
    [
        ({"rope_theta": 500.0}, {"rope_theta": 500.0}),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}, {"rope_theta": 50.0}),
        ({"rms_norm_eps": 0.5}, {"rms_norm_eps": 0.5}),
    ],
)
def test_overrides_of_the_configuration_reach_the_model(tmp_path, overrides, in_config):
    plain, changed = tmp_path / "plain", tmp_path / "changed"
    for folder in (plain, changed):
        folder.mkdir()
        write(folder)
    (changed / "config.json").write_text(json.dumps(CONFIG | in_config))
    reference, _ = load_model(changed)
    reference.set_dtype(mx.float32)
    found = logits(load(plain, hf_overrides=overrides))
    np.testing.assert_allclose(found, logits(reference), atol=1e-5)
    assert not np.allclose(found, logits(load(plain)), atol=1e-3)


@pytest.mark.parametrize(
    ("stated", "overrides", "named"),
    [
        ({"is_causal": False}, {"is_causal": None}, "is_causal (False)"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "low_freq_factor": 2.0}},
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "factor": 4.0,
                    "low_freq_factor": None,
                }
            },
            "rope_parameters.low_freq_factor (2.0)",
        ),
    ],
    ids=["a key", "of the rope"],
)
def test_a_key_that_the_module_does_not_read_is_taken_away_by_an_override(
    tmp_path, monkeypatch, stated, overrides, named
):
    write(tmp_path, **stated)
    with pytest.raises(loader.ModelLoadError, match="--hf-overrides"):
        load(tmp_path)
    warned = []
    monkeypatch.setattr(loader.logger, "warning", lambda text, *args: warned.append(text % args))
    load(tmp_path, hf_overrides=overrides)
    assert [named in each for each in warned] == [True]


def test_an_explicit_dtype_is_honored(tmp_path):
    write(tmp_path)
    model = load(tmp_path, dtype="float16")
    assert {array.dtype for _, array in tree_flatten(model.parameters())} == {mx.float16}


@pytest.mark.parametrize("name", ["gate.e_score_correction_bias", "mixer.A_log", "mixer.dt_bias"])
def test_vectors_whose_rounding_grows_with_a_text_stay_float32(name):
    vector, matrix = mx.ones((4,)), mx.ones((4, 4))
    found = loader.in_dtype(
        {f"layers.0.{name}": vector, "layers.0.gate.weight": matrix}, mx.float16
    )
    assert [array.dtype for array in found.values()] == [mx.float32, mx.float16]
    (half,) = loader.in_dtype({name: vector.astype(mx.bfloat16)}, mx.float16).values()
    assert half.dtype == mx.float16  # as the file is, less would be gained


def test_missing_weights_are_named(tmp_path):
    (write(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(loader.ModelLoadError, match=r"/model\.safetensors is missing"):
        load(tmp_path)


def test_truncated_weights_are_named(tmp_path):
    weights = write(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(loader.ModelLoadError, match=str(tmp_path)):
        load(tmp_path)


def test_weights_that_do_not_fit_the_config_are_named(tmp_path):
    write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(loader.ModelLoadError, match=r"layers\.2"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [mx.uint8, mx.int32, mx.bool_], ids=str)
def test_integers_are_not_taken_for_values(tmp_path, dtype):
    path = str(write(tmp_path) / "model.safetensors")
    arrays, name = mx.load(path), "model.layers.0.mlp.up_proj.weight"
    mx.save_safetensors(path, arrays | {name: arrays[name].astype(dtype)}, {"format": "pt"})
    with pytest.raises(loader.ModelLoadError, match=rf"{name} is stored as \w+, but is no quant"):
        load(tmp_path)


@pytest.mark.parametrize("changes", [{"hidden_size": "64"}, {"hidden_size": None}])
def test_a_config_that_no_model_can_be_built_from_is_named(tmp_path, changes):
    write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(loader.ModelLoadError, match=f"cannot load {tmp_path}"):
        loader.lazy_model(tmp_path, mx.float32)


def test_a_family_mlx_lm_lacks_is_named(tmp_path):
    write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "opt", "architectures": ["OPTForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(loader.ModelLoadError, match="opt"):
        load(tmp_path)


def load_pair(target, draft, **options):
    """Loads the draft model of a target."""
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    args = EngineArgs(
        model=str(target),
        skip_tokenizer_init=True,
        max_model_len=128,
        speculative_config=speculation,
        **options,
    )
    config = args.create_engine_config()
    loader.check_draft_vocabulary(config)
    return loader.load(config, config.speculative_config.draft_model_config)


def write_tokenizer(folder, tokens, added=(), unigram=False):
    if unigram:
        vocab = [[token, -1.0] for token in tokens]
    else:
        vocab = {token: index for index, token in enumerate(tokens)}
    special = [{"id": index, "content": token} for index, token in added]
    content = {"model": {"vocab": vocab}, "added_tokens": special}
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.fixture
def pair(tmp_path):
    """Folders of a target and of a one-layer draft model."""
    folders = tmp_path / "target", tmp_path / "draft"
    for folder, num_layers in zip(folders, (2, 1), strict=True):
        folder.mkdir()
        write(folder, num_hidden_layers=num_layers)
    return folders


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_draft_model_comes_in_the_targets_dtype(pair, dtype):
    target, draft = pair
    model = load_pair(target, draft, dtype=dtype)
    assert len(model.layers) == 1
    reference, _ = load_model(draft)
    dtypes = {array.dtype for _, array in tree_flatten(model.parameters())}
    assert dtypes == {getattr(mx, dtype)}
    np.testing.assert_allclose(logits(model), logits(reference), atol=0.02)


@pytest.mark.parametrize("unigram", [False, True])
def test_vocabularies_that_contradict_each_other_are_refused(pair, unigram):
    target, draft = pair
    write_tokenizer(target, ["a", "b", "c"], [(3, "<s>")], unigram)
    write_tokenizer(draft, ["a", "c", "b"], [(3, "<s>")], unigram)
    with pytest.raises(loader.ModelLoadError, match=rf"token 1 is 'b' in {target} and 'c' in"):
        load_pair(target, draft)
    write_tokenizer(draft, ["a", "b", "c"], [(3, "</s>")], unigram)
    with pytest.raises(loader.ModelLoadError, match=rf"token 3 is '<s>' in .* '</s>' in {draft}"):
        load_pair(target, draft)


def test_a_draft_models_tokenizer_may_lack_tokens_or_files(pair):
    target, draft = pair
    write_tokenizer(target, ["a", "b", "c"], [(3, "<s>")])
    load_pair(target, draft)
    write_tokenizer(draft, ["a", "b", "c"], [(7, "<more>")])
    load_pair(target, draft)


def head_config(target, head):
    speculation = {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}
    args = EngineArgs(
        model=str(target),
        skip_tokenizer_init=True,
        max_model_len=128,
        speculative_config=speculation,
    )
    return args.create_engine_config()


def test_heads_without_readable_weights_are_named(pair):
    _, head = pair
    config = head_config(*pair)
    draft_config = config.speculative_config.draft_model_config
    weights = head / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(loader.ModelLoadError, match=str(head)):
        loader.load_weights(draft_config, config)
    weights.unlink()
    with pytest.raises(loader.ModelLoadError, match=rf"no weights .* in {head}"):
        loader.load_weights(draft_config, config)
    (head / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(loader.ModelLoadError, match=str(head)):
        loader.load_weights(draft_config, config)


def test_a_checkpoint_that_is_no_head_is_named(pair):
    target, head = pair
    config = head_config(target, head)
    model = load(target)
    with pytest.raises(loader.ModelLoadError, match=rf"{head} are not of EagleLlamaForCausalLM"):
        load_network(config, parts.ModelParts(model))
