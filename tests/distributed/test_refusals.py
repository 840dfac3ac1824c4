# SPDX-License-Identifier: Apache-2.0
"""What several ranks of one model do not do is refused by name, however the model is divided."""

import pytest
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

LAYERS, HEADS = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 3}  # of 9 heads
PEERS = KVTransferConfig(kv_connector="MetalKVConnector", kv_role="kv_both")
LOOKUP = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def model():
    from vllm_metal.models.embedded import embedded_model_path

    return str(embedded_model_path(dequantize=True))


def configure(model, options):
    return EngineArgs(model=model, max_model_len=256, **options).create_engine_config()


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (LAYERS, "with --pipeline-parallel-size"),
        (HEADS, "with --tensor-parallel-size"),
        (LAYERS | HEADS, "with --pipeline-parallel-size and --tensor-parallel-size"),
    ],
)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"enable_lora": True}, "--enable-lora {said} "),
        ({"enable_sleep_mode": True}, "--enable-sleep-mode {said}"),
        ({"runner": "pooling"}, "--runner pooling {said} "),
        ({"kv_transfer_config": PEERS}, "--kv-transfer-config, or a prefix cache on disk, {said}"),
    ],
)
def test_a_setting_is_named_once_with_the_ways_of_dividing(model, ranks, said, options, named):
    with pytest.raises(ValueError) as refused:
        configure(model, ranks | options)
    assert str(refused.value).count(named.format(said=said)) == 1


def test_drafts_that_are_looked_up_go_with_heads(model):
    configure(model, HEADS | {"speculative_config": LOOKUP})


def test_what_both_do_is_served(model):
    configure(model, LAYERS | HEADS)
