# SPDX-License-Identifier: Apache-2.0
"""Registered model properties, against vLLM's own classes."""

import dataclasses
import importlib
import json
import pickle
from contextlib import nullcontext

import pytest
from engine.config_json.real_configs import FILES
from engine.models import further, of_mlx_vlm
from engine.models.recurrent import VOCAB, config_of
from transformers import AutoConfig
from transformers.integrations.heterogeneity.configuration_utils import (
    AmbiguousGlobalPerLayerAttributeError,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models import registry as vllms
from vllm.platforms import current_platform

from vllm_metal.engine.spec_decode.registry import BY_NAME
from vllm_metal.patches.vllm_patches.image_processors import readable
from vllm_metal.patches.vllm_patches.model_info import ImageModel, TextModel, accept_mlx_models
from vllm_metal.settings.architectures import DROPPED_HEADS, TEXT_ARCHITECTURES, WITH_IMAGES

#: Fields that differ from those of vLLM's class, for whole kinds of architectures, with reasons.
REASONS = {
    "architecture": "vLLM has one class for several architectures; it only logs this name",
    "supports_pp": "always so, for the platform refuses --pipeline-parallel-size by its name",
    "supports_lora": "adapters adapt MLX's layers, whatever vLLM's class supports",
    "supports_hc_sp": "a mode of vLLM's sequence parallel ranks, which are rejected",
    "supports_replayssm": "a mode of vLLM's kernels for recurrent layers, which are not used",
}
#: Text parts of multimodal models and the draft heads of such: served without images and sound.
TEXT_PARTS = {
    "CohereCompassForConditionalGeneration",
    "DeepseekV41ForCausalLM",
    "Ernie4_5_VLMoeForConditionalGeneration",
    "GlmOcrForConditionalGeneration",
    "HfMoondream",
    "JinaVLMForConditionalGeneration",
    "Moondream3ForCausalLM",
    "MllamaForConditionalGeneration",
    "MolmoForCausalLM",
    "Molmo2ForConditionalGeneration",
    "InklingForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "KimiVLForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
    "MiMoV2OmniMTPModel",
    "Exaone4_5_MTP",
    # their classes cannot be imported without torchvision
    "Qwen3_5MTP",
    "Qwen3_5MoeMTP",
    "InternS2MobiusMTP",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration",
}
OF_IMAGES_AND_SOUND = {
    "supports_multimodal",
    "supports_multimodal_encoder_tp_data",
    "supports_mm_device_do_normalize",
    "supported_video_pruning_methods",
    "supports_transcription",
}
#: Abilities with images that vLLM's classes have and our towers lack; hybrids' are only
#: marked as hybrid.
OF_TOWERS = {
    "has_inner_state",
    "supports_multimodal_encoder_tp_data",
    "supports_mm_device_do_normalize",
    "supported_video_pruning_methods",
}
#: vLLM's classes of draft heads that lack a method of text models; vLLM does not ask it of drafts.
NO_TEXT_MODELS = {
    "ExtractHiddenStatesModel",
    "ExaoneMoeMTP",
    "NemotronHMTPModel",
    "LongCatFlashMTPModel",
    "HYV3MTPModel",
    "HYV4MTPModel",
}
#: Classes that cannot be imported here, and what they lack.
NOT_IMPORTED = {
    "torchvision": {
        "Qwen4ExpForCausalLM",
        "Glm5NextForCausalLM",
        "MiniMaxM3SparseForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "MiniMaxM3MTP",
        "Glm5NextMTPModel",
        "Qwen4ExpMTP",
        "Qwen3_5MTP",
        "Qwen3_5MoeMTP",
        "InternS2MobiusMTP",
        "Step5ForCausalLM",
        "Step5MTP",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "GlmOcrForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "MiMoV2OmniForCausalLM",
        "Step3p7ForConditionalGeneration",
    },
    "numba": {"InklingForCausalLM", "InklingForConditionalGeneration", "InklingMTPModel"},
    "torchvision, for Gemma4Processor": {"Gemma4ForConditionalGeneration"},
    "vLLM's FlashAttention": {"Dots3NoteMTPModel"},
}
#: Registered by this plugin; vLLM has no class of some of them.
OF_THIS_PLUGIN = {"MlxForCausalLM", *DROPPED_HEADS.values(), *TEXT_ARCHITECTURES}


def ours():
    current_platform.pre_register_and_update()
    return {
        name: model for name, model in ModelRegistry.models.items() if isinstance(model, TextModel)
    }


def expected_differences(name):
    different = set(REASONS)
    if name in TEXT_PARTS:
        different |= OF_IMAGES_AND_SOUND
    if name in WITH_IMAGES:
        different |= OF_TOWERS
    if name in NO_TEXT_MODELS:
        different.add("is_text_generation_model")
    if name == "DeepseekV41ForCausalLM":  # of n-gram memory, which is rejected
        different.add("requires_raw_input_tokens")
    return different


@pytest.mark.slow  # imports some two hundred of vLLM's classes
def test_the_answers_are_those_of_vllms_classes():
    allowed = set().union(*NOT_IMPORTED.values())
    compared, failed, wrong = set(), set(), {}
    for name, model in ours().items():
        if model.decoder is not None:  # vLLM adapts the decoder
            continue
        if name not in vllms._VLLM_MODELS:
            assert name in OF_THIS_PLUGIN
            continue
        module, class_name = vllms._VLLM_MODELS[name]
        try:
            with readable() if isinstance(model, ImageModel) else nullcontext():
                imported = importlib.import_module(vllms._resolve_module_name(module))
            info = vllms._ModelInfo.from_model_cls(getattr(imported, class_name))
        except (ImportError, ModuleNotFoundError):
            failed.add(name)
            continue
        compared.add(name)
        theirs, told = dataclasses.asdict(info), dataclasses.asdict(model.inspect_model_cls())
        different = {field for field in theirs if theirs[field] != told[field]}
        if different - expected_differences(name):
            wrong[name] = different - expected_differences(name)
    assert not wrong
    assert failed <= allowed  # an environment with more packages compares more
    assert len(compared) > 150


def test_decoders_that_pool_are_told_as_the_decoders_are():
    told = ours()
    for name, of in (("Qwen3NextModel", "Qwen3NextForCausalLM"), ("GPT2Model", "GPT2LMHeadModel")):
        pools, generates = (
            dataclasses.asdict(told[each].inspect_model_cls()) for each in (name, of)
        )
        different = {field for field in pools if pools[field] != generates[field]}
        assert different == {"architecture", "is_text_generation_model"}
    assert told["Qwen3NextModel"].inspect_model_cls().is_hybrid
    # vLLM's own classes attend in both directions, or are no decoders.
    for name in ("Gemma3TextModel", "BertModel", "LlamaBidirectionalModel", "ModernBertModel"):
        assert name not in told


def test_no_model_is_made_of_a_class():
    with pytest.raises(NotImplementedError, match="MixtralForCausalLM with MLX"):
        ours()["MixtralForCausalLM"].load_model_cls()(vllm_config=None)


def test_vllm_may_remember_and_send_an_answer():
    model = ours()["JambaForCausalLM"]
    assert {model: 1}[pickle.loads(pickle.dumps(model))] == 1
    info = model.inspect_model_cls()
    assert pickle.loads(pickle.dumps(info)) == info
    assert (info.is_hybrid, info.has_inner_state, info.is_attention_free) == (True, True, False)


def test_every_head_that_drafts_is_known():
    served = ours()
    heads = {name for method in BY_NAME.values() for name in method.architectures}
    assert heads and heads <= served.keys()
    assert {"MedusaModel", "MLPSpeculatorPreTrainedModel"} <= served.keys()


def test_models_of_other_images_stay_vllms():
    names = ("InternVLChatModel", "MuseGlimmerForCausalLM", "BertModel")
    assert not set(names) & ours().keys()
    assert set(names) <= ModelRegistry.models.keys()


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


def test_a_text_model_within_a_configuration_is_read(tmp_path):
    config = engine_config(tmp_path, config_of(of_mlx_vlm.FAMILIES["molmo2"])).model_config
    text = config.hf_text_config
    assert (text.model_type, text.num_hidden_layers, text.num_attention_heads) == (
        "molmo2_text",
        4,
        6,
    )
    assert (config.get_hidden_size(), config.get_vocab_size()) == (72, VOCAB)
    again = pickle.loads(pickle.dumps(config.hf_config))
    assert again.to_dict() == config.hf_config.to_dict()


def test_values_that_layers_override_are_read_for_the_whole_model(tmp_path):
    config = engine_config(tmp_path, config_of(of_mlx_vlm.FAMILIES["step3p7"])).model_config
    with pytest.raises(AmbiguousGlobalPerLayerAttributeError):
        _ = AutoConfig.from_pretrained(tmp_path).text_config.num_attention_heads
    assert config.hf_text_config.num_attention_heads == 6


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


def test_configurations_of_families_that_transformers_lacks_are_read():
    accept_mlx_models()
    made = set()
    for name, config in FILES:
        kind = config["model_type"]
        cls = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None  # noqa: SIM401 (lazy)
        if cls is not None and cls.__name__ == "MlxConfig":
            assert cls.from_dict(dict(config)).max_position_embeddings > 1, name
            made.add(config["model_type"])
    assert {"minicpm", "nemotron-nas", "qwen"} <= made  # two of them scale their ropes


def test_blocks_of_a_published_file_have_attributes(tmp_path):
    config = next(config for _, config in FILES if config["model_type"] == "nemotron-nas")
    attention = {"n_heads_in_group": 8, "no_op": False}
    blocks = [{"attention": {"n_heads_in_group": None, "no_op": True}}, {"attention": attention}]
    model = engine_config(tmp_path, config | {"block_configs": blocks}).model_config
    assert model.get_total_num_kv_heads() == config["num_attention_heads"] // 8
    assert json.loads(json.dumps(model.hf_config.to_dict()["block_configs"])) == blocks
