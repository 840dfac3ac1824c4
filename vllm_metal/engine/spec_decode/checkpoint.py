# SPDX-License-Identifier: Apache-2.0
"""Checks a draft checkpoint, as far as is possible before any weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_metal.engine.models.mtp_families import MTP_FAMILIES
from vllm_metal.engine.spec_decode import block_config, mtp_folders
from vllm_metal.engine.spec_decode.mtp_folders import published
from vllm_metal.engine.spec_decode.registry import method_of
from vllm_metal.identity.model_files import ModelLoadError, is_gguf
from vllm_metal.settings.architectures import ASSISTED, SPLIT_MTP, mtp_depth

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig

#: Files that weights come in.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
#: Default num_speculative_tokens of one MTP layer; lengths adapt below it.
DEFAULT_MTP_DRAFTS = 3
_OPTION = "--speculative-config"


def completed(given: Mapping[str, Any], target: ModelConfig) -> dict[str, Any]:
    """Completes --speculative-config with the checkpoint of MTP layers and the number of drafts.

    Args:
        given: the option's value.
        target: the target model's configuration; the checkpoint may not be on this disk.

    Returns:
        Keys to add to the option's value; empty if it is complete, or for vLLM to reject.

    Raises:
        ValueError: the model has no MTP layers, or their kind is not supported.
    """
    method, model = str(given.get("method")), given.get("model")
    found: dict[str, Any] = {}
    if method.endswith("mtp"):
        if model is None and (place := _beside(target)) is not None:
            found["model"] = str(place)
        layers = mtp_folders.folder_of(found.get("model") or model or target.model)
        content = target.hf_config.to_dict() if layers is None else published(layers)
        _check_split(layers, content)
        # vLLM reads the number of layers of a checkpoint that is yet to be fetched.
        is_unread = layers is None and model is not None
        if not is_unread and not mtp_folders.is_depth_supported(content):
            raise ValueError(
                f"num_nextn_predict_layers={mtp_folders.depth_of(content)} in config.json is not "
                f"supported with {_OPTION} method 'mtp': one MTP layer drafts all tokens of "
                f"{content['model_type']}. Set it to 1 if the checkpoint has one, or choose "
                "another method."
            )
        if not is_unread and (key := mtp_folders.unknown_key(content)) is not None:
            raise ValueError(
                f"{key} in config.json is not supported with {_OPTION} method 'mtp': vLLM's class "
                "does not read it. Choose another method."
            )
        count = None if is_unread else default_mtp_drafts(content)
    elif method in block_config.METHODS:
        most = block_config.most_drafts(published(Path(str(model))), method)
        count = min(block_config.DEFAULT_DRAFTS, most or block_config.DEFAULT_DRAFTS)
    else:
        return {}
    if count is not None and given.get("num_speculative_tokens") is None:
        found["num_speculative_tokens"] = count
    return found


def default_mtp_drafts(content: Mapping[str, Any]) -> int:
    """Default number of drafts for MTP layers, from their checkpoint's config.json."""
    if (of_family := mtp_folders.default_drafts(content)) is not None:
        return of_family
    if mtp_folders.depth_of(content) < 2:
        return DEFAULT_MTP_DRAFTS
    return mtp_folders.num_drafting(content)


def _beside(target: ModelConfig) -> Path | None:
    """The folder of MTP layers or an assistant; None if the model needs none or is not on disk."""
    folder = mtp_folders.folder_of(target.model, target.revision)
    if folder is None:
        return None
    is_assisted = mtp_folders.is_assisted(content := published(folder))
    if mtp_folders.family_of(content) is None and not is_assisted:
        return None
    if mtp_folders.carries_layers(folder):
        return None
    if (place := mtp_folders.split_beside(folder)) is not None:
        return place
    if is_assisted:
        raise ValueError(
            f"{_OPTION} method 'mtp' needs Gemma 4's assistant for {target.model}, and none was "
            f'found in {mtp_folders.places(folder)}. Set "model" to it, or choose another method.'
        )
    raise ValueError(
        f"{_OPTION} method 'mtp' needs MTP layers, but {target.model} contains none, like most "
        f'conversions to MLX, and none were found in {mtp_folders.places(folder)}. Set "model" '
        "to the original checkpoint, or to a folder written by mlx-vlm's split_mtp, or choose "
        "another method."
    )


def _check_split(folder: Path | None, content: Mapping[str, Any]) -> None:
    if folder is None or not mtp_folders.is_split(content):
        return
    if mtp_folders.architecture_of(content) is None:
        served = ", ".join(dict.fromkeys(name for kinds in SPLIT_MTP.values() for name in kinds))
        of = f"{content['model_type']} of a {content['text_config'].get('model_type')} model"
        raise ValueError(
            f"{_OPTION} model {str(folder)!r} is not supported: {of}; split MTP layers are "
            f"supported for {served}. Choose another method."
        )


def refusals(config: VllmConfig) -> dict[str, bool]:
    """Checks the checkpoint of --speculative-config; maps each error message to whether it applies.

    Reads only a local folder and config.json, so a checkpoint may still fail to load.

    Raises:
        ValueError: the method is not supported, or config.json of a block drafter has an
            unsupported key or value.
    """
    speculation, method = config.speculative_config, method_of(config)
    if speculation is None or method is None or speculation.draft_model_config is None:
        return {}
    draft, found = speculation.draft_model_config, {}
    if "mtp" in method.names:
        found = _of_depth(speculation, config.kv_transfer_config is not None)
    if draft.model is None or draft.model == config.model_config.model:
        return found
    named = f"{_OPTION} model {draft.model!r}"
    folder = Path(draft.model)
    found |= {
        f"{named} (the folder holds no weights, {', '.join(WEIGHTS)}: fetch them, or name another "
        "folder)": folder.is_dir()
        and not is_gguf(folder)
        and not any(any(folder.glob(kind)) for kind in WEIGHTS)
    }
    if "mtp" in method.names:
        check = _of_another if method.keeps_kv else _of_assistant
        found |= check(draft, config.model_config)
    if method.hidden_size_keys:
        given = draft.hf_config.to_dict()
        size = next((given[key] for key in method.hidden_size_keys if given.get(key)), None)
        wanted = config.model_config.get_hidden_size()
        found[
            f"{named} (made for hidden states of size {size}, but those of "
            f"{config.model_config.model!r} are of {wanted}: choose a head that was made "
            "for this model)"
        ] = size != wanted
    if method.names[0] in block_config.METHODS:
        found |= _of_block_drafter(speculation)
    return found


def _of_depth(speculation: SpeculativeConfig, has_store: bool) -> dict[str, bool]:
    draft, asked = speculation.draft_model_config, speculation.num_speculative_tokens or 0
    (architecture, *_) = draft.architectures
    if (family := MTP_FAMILIES.get(architecture)) is None:  # `refusals` rejects it
        return {}
    depth = mtp_depth(draft.hf_text_config.to_dict())
    most = family.num_drafting(depth, getattr(draft.hf_config, "is_split", False))
    several = "" if most > 1 else ", and only the first is served for this family"
    return {
        f"{_OPTION} num_speculative_tokens {asked} (config.json states {depth} MTP layers, each "
        f"of which drafts one token{several}: choose {most} or fewer)": asked > most
        and (depth > 1 or family.default_drafts is not None),
        f"{_OPTION} num_speculative_tokens {asked} with several MTP layers and a KV connector "
        "(K/V of a page would depend on later tokens: choose 1)": (
            has_store and min(most, asked) > 1
        ),
        f"{_OPTION} method 'mtp' with the MTP layers of {family.title} and a KV connector (stored "
        "blocks would not be found: choose method ngram or suffix)": (
            has_store and family.default_drafts is not None
        ),
    }


def _of_another(draft: ModelConfig, target: ModelConfig) -> dict[str, bool]:
    (architecture, *_) = draft.architectures
    family = MTP_FAMILIES.get(architecture)
    if family is None:  # `refusals` rejects it
        return {}
    kind = target.hf_config.model_type
    sizes = (draft.get_hidden_size(), target.get_hidden_size())
    tokens = (draft.get_vocab_size(), target.get_vocab_size())
    named = f"{_OPTION} model {draft.model!r} "
    remedy = "choose MTP layers that were made for this model"
    return {
        f"{named}(MTP layers of {family.model_types[0]} with a model of type {kind}: {remedy})": (
            kind not in family.model_types
        ),
        f"{named}(made for hidden states of size {sizes[0]}, but those of {target.model!r} are of "
        f"{sizes[1]}: {remedy})": sizes[0] != sizes[1],
        f"{named}(made for a vocabulary of {tokens[0]}, but that of {target.model!r} has "
        f"{tokens[1]}: {remedy})": tokens[0] != tokens[1],
    }


def _of_assistant(draft: ModelConfig, target: ModelConfig) -> dict[str, bool]:
    from vllm_metal.engine.spec_decode import assistant_config  # reads it with MLX

    if content := published(Path(draft.model)):
        try:
            assistant_config.AssistantConfig.of(content)
        except ModelLoadError as error:
            raise ValueError(str(error)) from error
    kind, tokens = target.hf_config.model_type, (draft.get_vocab_size(), target.get_vocab_size())
    named, remedy = f"{_OPTION} model {draft.model!r} ", "choose another drafter"
    return {
        f"{named}(Gemma 4's assistant with a model of type {kind}: {remedy})": (
            kind not in ASSISTED
        ),
        f"{named}(made for a vocabulary of {tokens[0]}, but that of {target.model!r} has "
        f"{tokens[1]}: {remedy})": tokens[0] != tokens[1],
    }


def _of_block_drafter(speculation: SpeculativeConfig) -> dict[str, bool]:
    draft = speculation.draft_model_config
    given = draft.hf_config.to_dict()
    content = published(Path(draft.model))
    (architecture, *_) = draft.architectures
    if content and architecture in block_config.KINDS:  # `refusals` rejects all others
        try:
            block_config.BlockConfig.of(given, content, architecture)
        except ModelLoadError as error:
            raise ValueError(str(error)) from error
    most = block_config.most_drafts(content or given, speculation.method or "")
    asked = speculation.num_speculative_tokens or 0
    return {
        f"{_OPTION} num_speculative_tokens {asked} (the drafter {draft.model!r} was "
        f"trained to draft {most} tokens at once: choose {most} or fewer)": most is not None
        and asked > most
    }
