# SPDX-License-Identifier: Apache-2.0
"""Settings that are rejected for pooling models before loading."""

import json
import shutil
from pathlib import Path

import pytest
from engine.pooling import checkpoints
from vllm.engine.arg_utils import EngineArgs


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return checkpoints.qwen3(tmp_path_factory.mktemp("plain") / "model")


def configure(model, **options):
    options = {"max_model_len": 256, "runner": "pooling"} | options
    return EngineArgs(model=model, **options).create_engine_config()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"logits_processors": ["json:JSONDecoder"]}, "--logits-processors with --runner pooling"),
        (
            {"pooler_config": {"seq_pooling_type": "MEAN"}, "enable_chunked_prefill": True},
            "--enable-chunked-prefill with MEAN/ALL pooling",
        ),
        (
            {"pooler_config": {"seq_pooling_type": "CLS"}, "enable_prefix_caching": True},
            "--enable-prefix-caching with CLS/ALL pooling",
        ),
        ({"hf_overrides": {"is_causal": False}}, "bidirectional encoder"),
        ({"hf_overrides": {"use_bidirectional_attention": True}}, "bidirectional encoder"),
    ],
)
def test_what_cannot_be_honored_is_named(plain, options, named):
    with pytest.raises(ValueError, match=named):
        configure(plain, **options)


@pytest.mark.parametrize(
    ("architecture", "runner", "convert"),
    [
        ("Qwen3ForCausalLM", "generate", "none"),
        ("Qwen3Model", "pooling", "embed"),
        ("Qwen3ForSequenceClassification", "pooling", "classify"),
        ("Qwen3ForTokenClassification", "pooling", "classify"),
        ("LlamaModel", "pooling", "embed"),
        ("GPT2ForSequenceClassification", "pooling", "classify"),
    ],
)
def test_an_architecture_says_what_a_decoder_is_for(plain, architecture, runner, convert):
    config = configure(plain, runner="auto", hf_overrides={"architectures": [architecture]})
    model = config.model_config
    assert (model.runner_type, model.convert_type) == (runner, convert)
    pools = runner == "pooling"
    assert config.cache_config.enable_prefix_caching
    assert config.scheduler_config.enable_chunked_prefill
    assert (model.pooler_config is not None) == pools
    if pools:
        assert model.pooler_config.seq_pooling_type == "LAST"
    if convert == "classify":
        assert model.score_type == "cross-encoder"


@pytest.fixture
def published(plain, tmp_path):
    """A checkpoint with sentence-transformers files, and a function to change one."""
    folder = str(shutil.copytree(plain, tmp_path / "model", symlinks=True))
    checkpoints.as_sentence_transformer(folder, dense=8)

    def change(name, edit):
        path = Path(folder) / name
        content = json.loads(path.read_text())
        edit(content)
        path.write_text(json.dumps(content))

    return folder, change


def mode(**keys):
    return "1_Pooling/config.json", lambda content: (content.clear(), content.update(keys))


def module(place, **keys):
    return "modules.json", lambda content: content[place].update(keys)


@pytest.mark.more
@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (mode(pooling_mode_max_tokens=True), "pooling by max_tokens"),
        (mode(pooling_mode_mean_sqrt_len_tokens=True), "pooling by mean_sqrt_len_tokens"),
        (mode(pooling_mode="weightedmean"), "pooling by weightedmean"),
        (
            mode(pooling_mode_mean_tokens=True, pooling_mode_cls_token=True),
            "in several ways .mean_tokens, cls_token",
        ),
        (mode(pooling_mode_mean_tokens=True, include_prompt=False), "without the prompt"),
        (module(2, type="mine.Dense"), "module mine.Dense"),
        (module(3, type="sentence_transformers.models.LayerNorm"), "module .*LayerNorm"),
        (module(0, path="0_Transformer"), "Transformer in folder 0_Transformer"),
    ],
)
def test_sentence_transformers_files_that_ask_for_more(published, edit, named):
    folder, change = published
    change(*edit)
    with pytest.raises(ValueError, match=f"sentence-transformers files ask for .*{named}"):
        configure(folder)


def test_a_way_of_pooling_that_its_user_names_counts(published):
    folder, change = published
    change(*mode(pooling_mode_max_tokens=True))
    config = configure(folder, pooler_config={"seq_pooling_type": "LAST"})
    assert config.model_config.pooler_config.seq_pooling_type == "LAST"
