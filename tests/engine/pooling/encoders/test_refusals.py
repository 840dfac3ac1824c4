# SPDX-License-Identifier: Apache-2.0
"""Settings that are rejected or set for encoders before loading."""

import json
import shutil

import pytest
from engine.pooling.encoders import checkpoints
from vllm.engine.arg_utils import EngineArgs


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    checkpoints.make("BertModel", folder)
    return folder


def configure(folder, **options):
    return EngineArgs(model=str(folder), skip_tokenizer_init=True, **options).create_engine_config()


def with_config(folder, tmp_path, **changes):
    """Copies the folder with another config.json."""
    copied = shutil.copytree(folder, tmp_path / "copied")
    content = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(content | changes))
    return copied


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"enable_chunked_prefill": True}, "--enable-chunked-prefill with CLS/ALL pooling"),
        ({"enable_prefix_caching": True}, "--enable-prefix-caching with CLS/ALL pooling"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8.* keeps no K/V"),
        ({"kv_cache_memory_bytes": 1 << 20}, "--kv-cache-memory-bytes .*keeps no K/V"),
        ({"num_gpu_blocks_override": 9}, "--num-gpu-blocks-override .*keeps no K/V"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"convert": "classify"}, "--convert classify of BertModel"),
    ],
)
def test_what_an_encoder_has_no_use_for_is_named(bert, options, named):
    with pytest.raises(ValueError, match=named):
        configure(bert, **options)


def test_unknown_encoders_are_refused_with_those_that_are_served(bert, tmp_path, monkeypatch):
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.bert import BertForTokenClassification

    # vLLM looks at a class of its own in another process, which takes half a minute.
    name, of_vllm = "BertForTokenClassification", ModelRegistry.models
    monkeypatch.setitem(of_vllm, name, of_vllm[name])
    ModelRegistry.register_model(name, BertForTokenClassification)
    folder = with_config(bert, tmp_path, architectures=["BertForTokenClassification"])
    with pytest.raises(
        ValueError, match=r"BertForTokenClassification .*bidirectional encoder.*BertModel.*XLMR"
    ):
        configure(folder)


def test_an_encoder_gets_its_worker_and_whole_texts(bert):
    config = configure(bert)
    assert config.parallel_config.worker_cls.endswith("EncoderWorker")
    assert config.model_config.runner_type == "pooling"
    assert not config.scheduler_config.enable_chunked_prefill
    assert not config.cache_config.enable_prefix_caching
    assert config.scheduler_config.max_num_batched_tokens >= config.model_config.max_model_len


def test_texts_are_no_longer_than_the_table_of_positions(tmp_path):
    """RoBERTa uses its first positions for no token."""
    checkpoints.make("XLMRobertaModel", tmp_path)
    assert configure(tmp_path).model_config.max_model_len == 128
    assert configure(tmp_path, max_model_len=100).model_config.max_model_len == 100
    with pytest.raises(ValueError, match=r"--max-model-len 130 \(the model has 128 positions"):
        configure(tmp_path, max_model_len=130)
