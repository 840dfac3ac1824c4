# SPDX-License-Identifier: Apache-2.0
"""Writes toy checkpoints that read images, so that transformers' own classes are the reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from engine.models.of_mlx_vlm import INKLING
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

#: Sizes that all toys share. None hides a constant: hidden_size is no square, heads are no power of
#: two, and head_dim * heads is not hidden_size, as in published models.
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 70, 136, 7, 1, 80
_TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 2048,
}
_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_channels": 3,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
}
_HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


@dataclass(frozen=True)
class Family:
    """A family of models that read images, in toy sizes.

    Attributes:
        architecture: the model's class in transformers.
        config: of config.json, from the ids of the special tokens by their text.
        special: texts of the special tokens, the first of which begin and end texts.
        image: what stands for an image in a prompt, before any processor expands it.
        template: Jinja of the chat template.
        files: further files by name, as they are in JSON.
        named: special tokens that the tokenizer has as attributes, by the attribute's name.
        video: what stands for a video in a prompt, if the family takes videos.
        byte_level: whether tokens are bytes, as transformers' own class of a tokenizer has them.
        ids: of special tokens that vLLM's processor knows by number, by their text.
        expanded: the same for transformers' processor; None: `image`.
        rounds_pixels: whether vLLM's processor rounds pixels to bfloat16.
        options: of the engine.
    """

    architecture: str
    config: Callable[[dict[str, int]], dict[str, Any]]
    special: tuple[str, ...]
    image: str
    template: str
    files: dict[str, Any]
    named: dict[str, str] = field(default_factory=dict)
    video: str | None = None
    byte_level: bool = False
    ids: dict[str, int] = field(default_factory=dict)
    expanded: str | None = None
    rounds_pixels: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path, *, few: bool = False, **changes: Any) -> str:
        """Writes a whole checkpoint of random float32 weights into `folder`; returns its path.

        Args:
            folder: is made if it is missing.
            few: whether the last eight tokens are nearly all that the model says, so that
                it repeats itself whatever its weights are, and n-gram drafts are right.
            changes: of keys of the text's configuration.
        """
        folder.mkdir(parents=True, exist_ok=True)
        ids = self._write_tokenizer(folder)
        config = self.config(ids)
        config["text_config"] |= {"vocab_size": max(ids.values()) + 1} | changes
        _write_model(self.architecture, config, folder, few)
        for name, content in self.files.items():
            (folder / name).write_text(json.dumps(content))
        return str(folder)

    def for_transformers(self, prompt: str) -> str:
        """A prompt for transformers' processor."""
        return prompt.replace(self.image, self.expanded or self.image)

    def _write_tokenizer(self, folder: Path) -> dict[str, int]:
        """A vocabulary of characters or bytes; returns all ids by their token."""
        tokenizer = _bytes(self.special) if self.byte_level else _characters(self.special, self.ids)
        tokenizer.save(str(folder / "tokenizer.json"))
        bos, eos = self.special[:2]
        content = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": eos,
            "pad_token": eos,
            "clean_up_tokenization_spaces": False,
            "extra_special_tokens": self.named,
            **self.named,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(content))
        (folder / "chat_template.jinja").write_text(self.template)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        return vocabulary


def _characters(special: tuple[str, ...], ids: dict[str, int]) -> Tokenizer:
    """A tokenizer of special tokens, printable characters, runs of line ends, and all bytes."""
    tokens = [*special, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokens += [chr(code) for code in range(33, 127)] + ["\n" * many for many in (1, 2, 3, 4)]
    merges = [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n")]
    vocabulary = {token: index for index, token in enumerate(tokens)} | ids
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    named = [AddedToken(token, normalized=False) for token in (*special, *ids)]
    tokenizer.add_special_tokens(named)
    return tokenizer


def _bytes(special: tuple[str, ...]) -> Tokenizer:
    """A tokenizer of special tokens and all bytes."""
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def _write_model(architecture: str, config: dict[str, Any], folder: Path, few: bool) -> None:
    import transformers

    cls = getattr(transformers, architecture)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # of what is added to below
        model = cls(cls.config_class(**config, architectures=[architecture])).float().eval()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if parameter.ndim > 1:  # outputs of the size of their inputs, so that images matter
                scale = 0.5 if "embed" in name else 1.0  # a tied head would repeat the last token
                parameter.copy_(noise * scale * parameter[0].numel() ** -0.5)
            else:
                parameter.add_(0.1 * noise)
        for name, buffer in model.named_buffers():  # what some towers clip and shift by
            if name.endswith(("_min", "_max")):
                buffer.fill_(-1.0 if name.endswith("_min") else 1.0)
            elif "std_" in name:
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=random))
        if few:
            model.get_output_embeddings().weight[:-8] *= 0.1
    model.save_pretrained(folder)


def _chatml(parts: str) -> str:
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        + parts
        + "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
_QWEN: dict[str, Any] = {
    "special": (
        "<|endoftext|>",
        "<|im_end|>",
        "<|im_start|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ),
    "byte_level": True,
    "image": _QWEN_IMAGE,
    "video": _QWEN_VIDEO,
    "template": _chatml(
        "{% if p.type == 'image' or 'image_url' in p %}" + _QWEN_IMAGE + "{% endif %}"
        "{% if p.type == 'video' %}" + _QWEN_VIDEO + "{% endif %}"
    ),
    "files": {
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
            "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256},  # 4 to 64 tokens
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            **_HALVES,
        },
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "processor_class": "Qwen3VLProcessor",
            "size": {"shortest_edge": 64 * 64, "longest_edge": 4 * 128 * 128},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            **_HALVES,
        },
    },
}


def _qwen_ids(ids: dict[str, int]) -> dict[str, int]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _qwen3_vl(ids: dict[str, int]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
    return _qwen_ids(ids) | {
        "text_config": _TEXT | {"rope_parameters": rope | {"mrope_section": [14, 13, 13]}},
        "vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]},
    }


def _qwen3_5(ids: dict[str, int]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
    layers = {
        "layer_types": ["linear_attention", "full_attention"],
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "partial_rotary_factor": 0.5,
    }
    partial = {"mrope_section": [7, 7, 6], "partial_rotary_factor": 0.5}
    return _qwen_ids(ids) | {
        "text_config": _TEXT | layers | {"rope_parameters": rope | partial},
        "vision_config": _QWEN_VISION,
    }


def _gemma3(ids: dict[str, int]) -> dict[str, Any]:
    layers = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window_pattern": 2,
        "sliding_window": 32,
        "query_pre_attn_scalar": HEAD_DIM,
    }
    return {
        "text_config": _TEXT | layers,
        "vision_config": _VISION | {"image_size": 64, "patch_size": 8, "vision_use_head": False},
        "mm_tokens_per_image": 16,
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "image_token_index": ids["<image_soft_token>"],
    }


def _gemma4(ids: dict[str, int]) -> dict[str, Any]:
    """Layers with embeddings of their own; a window that is less than an image."""
    text = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "global_head_dim": 2 * HEAD_DIM,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": len(ids),
        "use_bidirectional_attention": "vision",
        "final_logit_softcapping": 30.0,
        "pad_token_id": ids["<eos>"],
    }
    vision = {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 256,
        "default_output_length": 70,
        "use_clipped_linears": True,
        "standardize": True,
    }
    return {
        "text_config": _TEXT | text,
        "vision_config": {k: v for k, v in _VISION.items() if k != "num_channels"} | vision,
        "audio_config": None,
        "vocab_size": len(ids),  # mlx-lm reads it here
        "boi_token_id": ids["<|image>"],
        "eoi_token_id": ids["<image|>"],
        "image_token_id": ids["<|image|>"],
        "boa_token_id": ids["<|audio>"],
        "eoa_token_index": ids["<audio|>"],
        "audio_token_id": ids["<|audio|>"],
        "video_token_id": ids["<|video|>"],
    }


def _inkling(ids: dict[str, int]) -> dict[str, Any]:
    """Windows, and contexts that are longer than a bias."""
    text = INKLING | {
        "sliding_window_size": 19,
        "rel_extent": 45,
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "max_position_embeddings": 2048,
    }
    return {
        "text_config": text,
        "vision_config": {"n_layers": 4, "patch_size": 40, "temporal_patch_size": 2},
        "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8},
    }


def _lfm2_vl(ids: dict[str, int]) -> dict[str, Any]:
    text = _TEXT | {
        "model_type": "lfm2",
        "num_attention_heads": 5,  # heads of lfm2's are as wide as hidden_size says
        "num_key_value_heads": 1,
        "layer_types": ["conv", "full_attention"],
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
    }
    del text["head_dim"]
    return {
        "text_config": text,
        "vision_config": _VISION
        | {"model_type": "siglip2_vision_model", "num_patches": 36, "patch_size": 8}
        | {"vision_use_head": False},
        "downsample_factor": 2,
        "projector_hidden_size": 96,
        "image_token_id": ids["<image>"],
    }


def _mistral3(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "text_config": _TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": _VISION
        | {"model_type": "pixtral", "image_size": 128, "patch_size": 8, "hidden_act": "silu"},
        "image_token_index": ids["[IMG]"],
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,
    }


def _llava(ids: dict[str, int]) -> dict[str, Any]:
    found = _mistral3(ids)
    del found["spatial_merge_size"]
    return found | {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}


def _of_pixtral(merge: int) -> dict[str, Any]:
    """What families with Pixtral's tower have in common."""
    return dict(
        special=("<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        image="[IMG]",
        template=(
            "<s>{% for m in messages %}{% if m.role == 'user' %}[INST]{% endif %}"
            "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
            "{% if p.type == 'image' %}[IMG]{% elif p.type == 'text' %}{{ p.text }}"
            "{% endif %}{% endfor %}{% endif %}"
            "{% if m.role == 'user' %}[/INST]{% else %}</s>{% endif %}{% endfor %}"
        ),
        files={
            "preprocessor_config.json": {
                "image_processor_type": "PixtralImageProcessorFast",
                "processor_class": "PixtralProcessor",
                "size": {"longest_edge": 128},
                "patch_size": {"height": 8, "width": 8},
                "image_mean": [0.48145466, 0.4578275, 0.40821073],
                "image_std": [0.26862954, 0.26130258, 0.27577711],
            },
            "processor_config.json": {
                "processor_class": "PixtralProcessor",
                "patch_size": 8,
                "spatial_merge_size": merge,
                "image_token": "[IMG]",
                "image_break_token": "[IMG_BREAK]",
                "image_end_token": "[IMG_END]",
            },
        },
    )


FAMILIES = {
    "qwen3_vl": Family("Qwen3VLForConditionalGeneration", _qwen3_vl, **_QWEN),
    "qwen3_5": Family("Qwen3_5ForConditionalGeneration", _qwen3_5, **_QWEN),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration",
        _gemma3,
        special=(
            "<bos>",
            "<eos>",
            "<start_of_turn>",
            "<end_of_turn>",
            "<start_of_image>",
            "<end_of_image>",
            "<image_soft_token>",
        ),
        image="<start_of_image>",
        template=(
            "<bos>{% for m in messages %}<start_of_turn>"
            "{{ 'model' if m.role == 'assistant' else m.role }}\n"
            "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
            "{% if p.type == 'image' %}<start_of_image>{% elif p.type == 'text' %}{{ p.text }}"
            "{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
            "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
        ),
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Gemma3ImageProcessor",
                "processor_class": "Gemma3Processor",
                "size": {"height": 64, "width": 64},
                **_HALVES,
            },
            "processor_config.json": {"image_seq_length": 16, "processor_class": "Gemma3Processor"},
        },
        named={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    ),
    "gemma4": Family(
        "Gemma4ForConditionalGeneration",
        _gemma4,
        special=(
            "<bos>",
            "<eos>",
            "<|turn>",
            "<turn|>",
            "<|image>",
            "<image|>",
            "<|image|>",
            "<|audio>",
            "<audio|>",
            "<|audio|>",
            "<|video|>",
        ),
        image="<|image|>",
        template=(
            "<bos>{% for m in messages %}<|turn>"
            "{{ 'model' if m.role == 'assistant' else m.role }}\n"
            "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
            "{% if p.type == 'image' %}<|image|>{% elif p.type == 'text' %}{{ p.text }}"
            "{% endif %}{% endfor %}{% endif %}<turn|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
        ),
        files={
            "processor_config.json": {
                "processor_class": "Gemma4Processor",
                "image_processor": {
                    "image_processor_type": "Gemma4ImageProcessor",
                    "max_soft_tokens": 70,
                    "patch_size": 4,
                    "pooling_kernel_size": 2,
                },
                "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
                "video_processor": {"video_processor_type": "Gemma4VideoProcessor"},
            },
        },
        named={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
    ),
    "inkling_mm_model": Family(
        "InklingForConditionalGeneration",
        _inkling,
        special=("<bos>", "<eos>"),
        ids={
            "<|content_image|>": 200005,
            "<|content_audio_input|>": 200020,
            **{f"<|unused_{index}|>": index for index in range(200053, 200064)},
        },
        options={"tokenizer_mode": "hf"},  # vLLM's own needs the published vocabulary
        image="<|content_image|>",
        expanded="<|content_image|><|unused_200054|>",
        rounds_pixels=True,
        template=(
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}{% if p.type == 'image' %}<|content_image|>"
            "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
        ),
        files={
            "processor_config.json": {
                "processor_class": "InklingProcessor",
                "image_processor": {
                    "image_processor_type": "InklingImageProcessor",
                    "rescale_image_frac": 1.0,  # vLLM's class scales by 2 where nothing is said
                    "rescale_image_max_upscaled_long_edge": 160,
                },
                "feature_extractor": {"feature_extractor_type": "InklingFeatureExtractor"},
            },
        },
    ),
    "lfm2_vl": Family(
        "Lfm2VlForConditionalGeneration",
        _lfm2_vl,
        special=(
            "<|startoftext|>",
            "<|im_end|>",
            "<|im_start|>",
            "<|image_start|>",
            "<|image_end|>",
            "<|img_thumbnail|>",
            "<image>",
            *(f"<|img_row_{row}_col_{column}|>" for row in (1, 2, 3, 4) for column in (1, 2, 3, 4)),
        ),
        byte_level=True,
        image="<image>",
        template=_chatml("{% if p.type == 'image' %}<image>{% endif %}"),
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Lfm2VlImageProcessor",
                "processor_class": "Lfm2VlProcessor",
                "encoder_patch_size": 8,
                "tile_size": 32,
                "max_tiles": 4,
                "min_image_tokens": 4,
                "max_image_tokens": 16,
                **_HALVES,
            },
        },
        named={
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        },
    ),
    "llava": Family("LlavaForConditionalGeneration", _llava, **_of_pixtral(1)),
    "mistral3": Family("Mistral3ForConditionalGeneration", _mistral3, **_of_pixtral(2)),
}
