# SPDX-License-Identifier: Apache-2.0
"""Configurations of families that mlx-lm alone has, as vLLM and its processes see them."""

import json
import pickle

import pytest
from models import further
from models.recurrent import config_of
from transformers import AutoConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform


def engine_config(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    made = EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=128)
    return made.create_engine_config()


def test_the_configuration_of_a_family_reaches_the_engines_process(tmp_path):
    config = engine_config(tmp_path, config_of(further.FAMILIES["rwkv7"]))
    again = pickle.loads(pickle.dumps(config.model_config.hf_config))
    assert again.to_dict() == config.model_config.hf_config.to_dict()
    assert again.decay_low_rank_dim == 8
    assert config.model_config.is_multimodal_model is False


OWN_CLASS = """
from transformers import PretrainedConfig


class OwnConfig(PretrainedConfig):
    model_type = "rwkv7"

    def __init__(self, hidden_act="silu", **values):
        super().__init__(**values)
        self.hidden_act, self.num_attention_heads = hidden_act, 2
"""


def test_a_checkpoints_own_class_goes_first_where_its_user_trusts_it(tmp_path):
    (tmp_path / "own.py").write_text(OWN_CLASS)
    config = config_of(further.FAMILIES["rwkv7"]) | {"auto_map": {"AutoConfig": "own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    current_platform.pre_register_and_update()
    trusted, plain = (
        AutoConfig.from_pretrained(tmp_path, trust_remote_code=trust) for trust in (True, False)
    )
    assert trusted.hidden_act == "silu" and not hasattr(plain, "hidden_act")


@pytest.mark.parametrize(
    "names",
    [
        {"model_dim": 48, "num_transformer_layers": 5, "num_heads": 4},
        {"d_model": 48, "n_layers": 5, "n_heads": 4},
    ],
)
def test_other_names_for_the_same_are_understood(names, tmp_path):
    config = {"model_type": "openelm", "architectures": ["OpenELMForCausalLM"], "vocab_size": 96}
    model = engine_config(tmp_path, config | names).model_config
    assert model.get_hidden_size() == 48
    found = model.hf_config
    assert (found.num_hidden_layers, found.num_attention_heads) == (5, 4)


def test_a_family_that_transformers_has_keeps_its_configuration():
    assert type(AutoConfig.for_model("llama")).__name__ == "LlamaConfig"
