# SPDX-License-Identifier: Apache-2.0
"""Settings that are not supported with several ranks are rejected."""

import pytest
from engine.models import published
from engine.models.plain import FAMILIES
from engine.models.recurrent import FAMILIES as OF_STATES
from engine.models.recurrent import write_model
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

LAYERS, HEADS = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 3}  # of 9 heads
PEERS = KVTransferConfig(kv_connector="MetalKVConnector", kv_role="kv_both")
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def model():
    from vllm_metal.engine.models.embedded import embedded_model_path

    return str(embedded_model_path(dequantize=True))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    families = {name: OF_STATES[name] for name in ("qwen3_next", "lfm2")}
    families["afm7"] = FAMILIES["afm7"]
    return {name: write_model(family, folder / name) for name, family in families.items()}


def configure(model, **options):
    settings = {"skip_tokenizer_init": True, "max_model_len": 256}
    return EngineArgs(model=model, **(settings | options)).create_engine_config()


#: Ways of dividing a model, and how they are named.
WAYS = (
    (LAYERS, "with --pipeline-parallel-size"),
    (HEADS, "with --tensor-parallel-size"),
    (LAYERS | HEADS, "with --pipeline-parallel-size and --tensor-parallel-size"),
)
REFUSED = (
    ({"enable_lora": True}, "--enable-lora {said} "),
    ({"enable_sleep_mode": True}, "--enable-sleep-mode {said}"),
    ({"runner": "pooling"}, "--runner pooling {said} "),
    ({"kv_transfer_config": PEERS}, "--kv-transfer-config, or a prefix cache on disk, {said}"),
)


@pytest.mark.parametrize(
    ("way", "setting"),
    [
        *zip([0, 1, 2, 2], range(4), strict=True),
        *(
            pytest.param(way, setting, marks=pytest.mark.slow)
            for setting, by_day in enumerate([0, 1, 2, 2])
            for way in {0, 1, 2} - {by_day}
        ),
    ],
)
def test_a_setting_is_named_once_with_the_ways_of_dividing(model, way, setting):
    (ranks, said), (options, named) = WAYS[way], REFUSED[setting]
    with pytest.raises(ValueError) as refused:
        configure(model, **ranks, **options)
    assert str(refused.value).count(named.format(said=said)) == 1


@pytest.mark.parametrize(
    ("ranks", "speculation"),
    [
        *((LAYERS, NGRAM), (HEADS, SUFFIX), (LAYERS | HEADS, None)),
        *(
            pytest.param(ranks, speculation, marks=pytest.mark.slow)
            for ranks, speculation in (
                *((LAYERS, SUFFIX), (HEADS, NGRAM), (LAYERS | HEADS, NGRAM)),
                *((LAYERS, None), (HEADS, None), (LAYERS | HEADS, SUFFIX)),
            )
        ),
    ],
)
def test_drafts_that_are_looked_up_are_served(model, ranks, speculation):
    config = configure(model, **ranks, speculative_config=speculation)
    assert not config.scheduler_config.async_scheduling


@pytest.mark.parametrize("ranks", [LAYERS, HEADS])
def test_drafts_of_a_network_are_not(model, ranks):
    draft = {"method": "draft_model", "model": model, "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match=r"--speculative-config with --.* and a draft network"):
        configure(model, **ranks, speculative_config=draft)


def test_layers_serve_states_without_drafts(folders):
    for name in ("qwen3_next", "lfm2"):
        configure(folders[name], **LAYERS)
        with pytest.raises(ValueError, match=r"--speculative-config with .*recurrent layers"):
            configure(folders[name], **LAYERS, speculative_config=NGRAM)


def test_layers_serve_no_family_that_was_not_shown_to_be_cut(folders):
    with pytest.raises(ValueError, match="--pipeline-parallel-size of model_type 'afm7'"):
        configure(folders["afm7"], **LAYERS)


@pytest.mark.parametrize("prefixes", [True, pytest.param(False, marks=pytest.mark.more)])
def test_heads_serve_states_with_cached_prefixes_and_without(tmp_path, prefixes):
    model = published.make(published.FAMILIES["qwen3_5_text"], num_key_value_heads=2)
    folder = published.write(model, tmp_path)
    configure(folder, tensor_parallel_size=2, enable_prefix_caching=prefixes)
