# SPDX-License-Identifier: Apache-2.0
"""What several ranks of one model do not serve is refused by name; what they serve is not."""

import pytest
from models import published
from models.plain import FAMILIES
from models.recurrent import FAMILIES as OF_STATES
from models.recurrent import write_model
from vllm.engine.arg_utils import EngineArgs

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    families = {name: OF_STATES[name] for name in ("qwen3_next", "lfm2")} | {
        "afm7": FAMILIES["afm7"],
        "llama": type(OF_STATES["lfm2"])("llama", "LlamaForCausalLM", {"num_hidden_layers": 2}),
    }
    return {name: write_model(family, folder / name) for name, family in families.items()}


def configure(model, **options):
    settings = {"skip_tokenizer_init": True, "max_model_len": 256}
    return EngineArgs(model=model, **(settings | options)).create_engine_config()


@pytest.mark.parametrize("speculation", [NGRAM, SUFFIX, None])
def test_layers_serve_drafts_that_are_looked_up(folders, speculation):
    config = configure(folders["llama"], pipeline_parallel_size=2, speculative_config=speculation)
    assert not config.scheduler_config.async_scheduling


def test_layers_serve_states_without_drafts(folders):
    for name in ("qwen3_next", "lfm2"):
        configure(folders[name], pipeline_parallel_size=2)
        with pytest.raises(
            ValueError, match=r"--speculative-config with .*whose layers keep state"
        ):
            configure(folders[name], pipeline_parallel_size=2, speculative_config=NGRAM)


def test_layers_serve_no_draft_network(folders):
    draft = {"method": "draft_model", "model": folders["llama"], "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="--speculative-config of a draft network with --pipeline"):
        configure(folders["llama"], pipeline_parallel_size=2, speculative_config=draft)


def test_layers_serve_no_family_that_was_not_shown_to_be_cut(folders):
    with pytest.raises(ValueError, match="--pipeline-parallel-size of model_type 'afm7'"):
        configure(folders["afm7"], pipeline_parallel_size=2)


@pytest.mark.parametrize("prefixes", [True, False])
def test_heads_serve_states_with_cached_prefixes_and_without(tmp_path, prefixes):
    model = published.make(published.FAMILIES["qwen3_5_text"], num_key_value_heads=2)
    folder = published.write(model, tmp_path)
    configure(folder, tensor_parallel_size=2, enable_prefix_caching=prefixes)
