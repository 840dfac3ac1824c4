# SPDX-License-Identifier: Apache-2.0
"""Describes the models that we serve to vLLM and transformers, mostly without their classes."""

# Remove when a platform can declare which families it serves, and what they can do. Read against
# vLLM 0.33.

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from vllm.config import ModelConfig
from vllm.config import model as config_of_models
from vllm.model_executor.models import ModelRegistry, registry
from vllm.model_executor.models.registry import _BaseRegisteredModel, _ModelInfo

from vllm_metal.patches.vllm_patches import image_names, inkling_images
from vllm_metal.patches.vllm_patches.image_processors import readable, refuse_bombs
from vllm_metal.patches.vllm_patches.replacing import replace
from vllm_metal.settings.architectures import (
    BY_TRANSFORMERS,
    DROPPED_HEADS,
    IMAGES_ONLY,
    MTP_DEPTHS,
    MULTIMODAL,
    SPLIT_MTP,
    TEXT_PARTS,
    WITH_IMAGES,
    mtp_depth,
)
from vllm_metal.settings.mlx_vlm_models import MLX_VLM_MODELS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: vLLM's name for families that it does not list; their configurations use it.
MLX_MODEL = "MlxForCausalLM"
#: Beginnings of architectures whose layers are all recurrent.
_ATTENTION_FREE = ("FalconMamba", "Mamba")
#: Beginnings of architectures with some recurrent layers.
_HYBRID = (
    "AliceAIFor",
    "BailingMoeV2_5For",
    "BailingMoeV3For",
    "FalconH1",
    "Glm5NextFor",
    "GraniteMoeHybrid",
    "Jamba",
    "KimiK3For",
    "KimiLinear",
    "Lfm2",
    "NemotronHFor",
    "NemotronHPuzzle",
    "OlmoHybrid",
    "Qwen3NextFor",
    "Qwen3_5For",
    "Qwen3_5MoeFor",
    "Qwen4ExpFor",
    "Zamba2",
)
#: Endings of architectures of text models that generate, and of those that embed or classify.
_GENERATES = ("ForCausalLM", "LMHeadModel")
_POOLS = ("Model", "ForSequenceClassification", "ForTokenClassification")
#: vLLM's own pooling models that are plain decoders, too.
_POOLING_DECODERS = frozenset(
    {
        "GPT2ForSequenceClassification",
        "Gemma2Model",
        "JambaForSequenceClassification",
        "LlamaModel",
        "MistralModel",
        "Qwen2Model",
    }
)
#: Some of its blocks have no attention at all.
_WITHOUT_SOME_LAYERS = ("DeciLMFor",)
#: Names of transformers that vLLM asks every configuration for, and what families call the same.
_OTHER_NAMES = {
    "hidden_size": ("d_model", "n_embd", "model_dim", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
}
#: Keys that say how long a text may be; the first that is there counts.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


class _NoModel:
    """Stand-in for vLLM's torch model class, which vLLM inspects for scoring models.

    It has the methods by which vLLM recognizes a model, and counts as a pooling model, since vLLM
    would wrap any other in an adapter.
    """

    is_pooling_model = True

    def __init__(self, vllm_config: Any, prefix: str = "") -> None:
        raise NotImplementedError(
            f"vllm-metal computes {type(self).__name__} with MLX, and uses no model class of vLLM"
        )

    def embed_input_ids(self, input_ids: Any) -> NoReturn:
        raise NotImplementedError

    def forward(self, input_ids: Any, positions: Any) -> NoReturn:
        raise NotImplementedError


@dataclass(frozen=True)
class TextModel(_BaseRegisteredModel):
    """A registered architecture that mlx-lm's module or a proposer of ours computes."""

    architecture: str
    decoder: str | None = None  # name of the decoder that pools; None: itself

    def inspect_model_cls(self) -> _ModelInfo:
        """The properties of the architecture that `vllm.config.ModelConfig` reads."""
        name = self.decoder or self.architecture
        hybrid, attention_free = name.startswith(_HYBRID), name.startswith(_ATTENTION_FREE)
        return _ModelInfo(
            architecture=self.architecture,
            is_text_generation_model=self.decoder is None,
            is_pooling_model=False,  # --convert makes it one
            attn_type="decoder",
            default_seq_pooling_type="LAST",
            default_tok_pooling_type="ALL",
            score_type="bi-encoder",
            supports_multimodal=False,
            supports_multimodal_raw_input_only=False,
            requires_raw_input_tokens=False,
            supports_multimodal_encoder_tp_data=False,
            supports_pp=True,
            supports_hc_sp=False,
            supports_lora=True,  # the platform says which are not
            has_inner_state=hybrid or attention_free,
            is_attention_free=attention_free,
            is_hybrid=hybrid,
            has_noops=name.startswith(_WITHOUT_SOME_LAYERS),
            supports_replayssm=False,
            supports_transcription=False,
            supports_transcription_only=False,
            supports_kv_cache_grouping=False,
            supported_video_pruning_methods=(),
            supports_mm_device_do_normalize=False,
        )

    def load_model_cls(self) -> type[Any]:
        """A class without any of vLLM's optional features, which cannot be instantiated."""
        return type(self.architecture, (_NoModel,), {})


@dataclass(frozen=True, kw_only=True)
class ImageModel(TextModel):
    """A registered architecture that also takes images; vLLM's class has the image processor."""

    own: _BaseRegisteredModel

    def inspect_model_cls(self) -> _ModelInfo:
        """The properties of the architecture that `vllm.config.ModelConfig` reads."""
        return replaced(super().inspect_model_cls(), supports_multimodal=True)

    def load_model_cls(self) -> Any:
        """vLLM's class, used only for its image processor."""
        refuse_bombs()
        image_names.separate_owners()
        with readable():
            if self.architecture == "InklingForConditionalGeneration":
                return inkling_images.processing_class()
            own: Any = self.own.load_model_cls()
        if self.architecture in IMAGES_ONLY:
            info = own._processor_factory.info
            replace(info, "get_supported_mm_limits", _images_alone)
            replace(info, "get_mm_max_tokens_per_item", _images_alone)
        return own


def _images_alone(
    ask: Callable[..., Mapping[str, int | None]], self: Any, *args: Any, **options: Any
) -> dict[str, int | None]:
    return {name: n for name, n in ask(self, *args, **options).items() if name == "image"}


def register_models() -> None:
    """Registers the properties of all architectures: text models, draft heads, those with images.

    Otherwise vLLM imports its own class in a new process to read the properties. That takes
    seconds at a first start, and fails if the class needs packages or a processor that serving text
    does not. Multimodal architectures count as text models if mlx-vlm, which has the towers, is not
    installed and mlx-lm has their text model. All other architectures remain vLLM's.
    """
    listed: dict[str, Any] = {
        **registry._TEXT_GENERATION_MODELS,
        **registry._TRANSFORMERS_SUPPORTED_MODELS,
        **registry._SPECULATIVE_DECODING_MODELS,
    }
    ours = {*listed, *TEXT_PARTS, *BY_TRANSFORMERS, *DROPPED_HEADS.values(), MLX_MODEL} - MULTIMODAL
    ModelRegistry.models.update({name: TextModel(name) for name in sorted(ours)})
    _answer_for_decoders_that_pool(ours)
    register_image_models()


def _answer_for_decoders_that_pool(text_models: Container[str]) -> None:
    """Registers the architecture names of decoders that embed or classify.

    For most of these names, vLLM finds the decoder only after looking for a transformers class.
    """
    listed = set(ModelRegistry.models)
    for name in sorted(listed):
        ending = next((each for each in _GENERATES if name.endswith(each)), None)
        if ending is None or name not in text_models:
            continue
        for pooling in (name.removesuffix(ending) + suffix for suffix in _POOLS):
            if pooling not in listed or pooling in _POOLING_DECODERS:
                ModelRegistry.models[pooling] = TextModel(pooling, name)


def register_image_models() -> None:
    """Registers the architectures whose images are served.

    Call it also in an engine's own process, where the scheduler uses their image processor.
    """
    for name in WITH_IMAGES:
        if name not in TEXT_PARTS or importlib.util.find_spec("mlx_vlm") is not None:
            module, cls = registry._VLLM_MODELS[name]
            own = registry._LazyRegisteredModel(registry._resolve_module_name(module), cls)
            ModelRegistry.models[name] = ImageModel(name, own=own)
    replace(ModelConfig, "_supports_multimodal_inputs", _with_a_class_for_images_only)


def _with_a_class_for_images_only(ask: Callable[[ModelConfig], bool], self: ModelConfig) -> bool:
    """Whether a model takes multimodal inputs; `ask`, which loads its class, says so unless
    --language-model-only excludes them.
    """
    config = self.multimodal_config
    if config is not None and config.language_model_only and not config.enable_mm_embeds:
        return False
    return ask(self)


def accept_mlx_models() -> None:
    """Makes transformers read the config.json of families that only MLX has, as MLX_MODEL.

    Also registers draft heads that vLLM dropped, and MTP layers that mlx-vlm split off. The state
    of the layers is inferred from mlx-lm's model.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    known = {*CONFIG_MAPPING, *_CONFIG_REGISTRY}
    for model_type in (*_model_types(known), *DROPPED_HEADS, *SPLIT_MTP):
        AutoConfig.register(model_type, _config_class(model_type))
    replace(config_of_models, "get_hf_text_config", _with_values_of_the_whole_model)


def _with_values_of_the_whole_model(
    read: Callable[[PretrainedConfig], PretrainedConfig], config: PretrainedConfig
) -> PretrainedConfig:
    # transformers raises if a value is read that some layers override, such as the number of heads
    # of Step 3.7. vLLM reads such values for its own classes; MLX's modules read those of a layer.
    each: Any
    for each in (config, getattr(config, "text_config", None)):  # a mapping in some files
        if getattr(each, "is_heterogeneous", False):
            each.allow_global_per_layer_attribute_access = True
    return read(config)


def _model_types(known: Collection[str]) -> list[str]:
    """Names of mlx-lm's and mlx-vlm's models that are not in `known`, without importing them."""
    found = importlib.util.find_spec("mlx_lm")
    assert found is not None and found.submodule_search_locations is not None
    folder = Path(found.submodule_search_locations[0]) / "models"
    unknown = (path for path in sorted(folder.glob("*.py")) if path.stem not in known)
    found_types = [path.stem for path in unknown if "class ModelArgs" in path.read_text()]
    of_mlx_vlm = (name for name in MLX_VLM_MODELS if name not in {*found_types, *known})
    return [*found_types, *of_mlx_vlm]


@functools.cache
def _config_class(model_type: str) -> type:
    from transformers import PretrainedConfig

    class MlxConfig(PretrainedConfig):
        """A configuration about which transformers knows nothing but its keys."""

        def __init__(self, **values: Any) -> None:
            if model_type in SPLIT_MTP and "text_config" in values:
                values = _of_split_layers(model_type, values)
            values.pop("layer_types", None)  # transformers takes no names that it does not know
            # transformers asks for it while it reads a scaled rope, before it sets other keys.
            longest = next((values[x] for x in _LENGTHS if values.get(x)), None)
            values = {key: _with_attributes(value) for key, value in values.items()}
            if isinstance(text := values.get("text_config"), Mapping):  # vLLM reads attributes
                values["text_config"] = _config_class(text.get("model_type", model_type))(**text)
            self.__dict__["max_position_embeddings"] = longest
            super().__init__(**{**values, "max_position_embeddings": longest})
            given = getattr(self, "architectures", None) or ()
            if not any(name in ModelRegistry.models for name in given):
                self.architectures = [MLX_MODEL]
            block = (values.get("block_config") or {}).get("attn_config") or {}  # Jina VLM
            found = {**block, **values}
            for name, others in _OTHER_NAMES.items():
                if getattr(self, name, None) is None:
                    setattr(self, name, next((found[x] for x in others if x in found), 1))

        def __reduce__(self) -> tuple[Any, ...]:
            """Makes the engine's process create the class again, since it cannot be imported."""
            return _restored, (model_type, self.to_dict())

    MlxConfig.model_type = model_type
    # With --trust-remote-code a checkpoint's own class goes before those of transformers' modules,
    # but not before those that others register.
    MlxConfig.__module__ = "transformers.models"
    return MlxConfig


def _of_split_layers(model_type: str, values: dict[str, Any]) -> dict[str, Any]:
    """The configuration of split MTP layers in the form that vLLM makes for a whole checkpoint."""
    text = dict(values.pop("text_config"))
    depth = mtp_depth(text) or 1
    for key in ("quantization", "quantization_config"):  # the whole checkpoint's
        text.pop(key, None)
    return {
        **text,
        **values,
        **dict.fromkeys((*MTP_DEPTHS, "n_predict"), depth),
        "architectures": [SPLIT_MTP[model_type][text["model_type"]]],
        "model_type": model_type,
        "is_split": True,
    }


class Keys(dict[str, Any]):
    """A mapping whose keys are also attributes, as in published configuration classes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _with_attributes(value: Any, within: bool = False) -> Any:
    """Converts mappings within a list so that vLLM can read their keys as attributes."""
    if isinstance(value, list):
        return [_with_attributes(each, within=True) for each in value]
    if within and isinstance(value, Mapping):
        return Keys({key: _with_attributes(each, within=True) for key, each in value.items()})
    return value


def _restored(model_type: str, values: dict[str, Any]) -> Any:
    return _config_class(model_type)(**values)
