# SPDX-License-Identifier: Apache-2.0
"""Toys that read images, networks that draft for them, and outside references for the drafts.

Hidden states, merged embeddings and positions are those of transformers' classes; heads on them are
vLLM's own torch classes, or the MTP layer's formula.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
import transformers
from engine.spec_decode import blocks, inkling
from engine.spec_decode.heads import one_process, random_arrays, vllm_module, write_head
from engine.spec_decode.hybrids import NaiveMTP, adds, mtp_shapes
from engine.vision import checkpoints
from engine.vision.checkpoints import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, Family
from engine.vision.reference import processor
from safetensors.torch import load_file, save_file
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM

from vllm_metal.engine.models import loader

NUM_LAYERS = 3
TAPS = (1, 2)  # layers whose output heads read, counted from 1
#: Changes of the text's configuration, by family; DeepStack adds to the first tap's states.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"num_hidden_layers": NUM_LAYERS},
    "qwen3_5": {
        "num_hidden_layers": NUM_LAYERS,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.5,
    },
}
#: Family and method.
CASES = {
    "qwen3_5, mtp": ("qwen3_5", "mtp"),
    "qwen3_vl, eagle3": ("qwen3_vl", "eagle3"),
    "qwen3_vl, eagle3 of one axis": ("qwen3_vl", "eagle3"),
    "qwen3_5, eagle3": ("qwen3_5", "eagle3"),
    "qwen3_vl, dflash": ("qwen3_vl", "dflash"),
    "qwen3_5, dflash": ("qwen3_5", "dflash"),
    "inkling, several mtp layers": ("inkling_mm_model", "mtp"),
}
#: The same for `write_guessable`.
GUESSABLE = {"qwen3_5, mtp": ("qwen3_5", "mtp"), "qwen3_vl, eagle": ("qwen3_vl", "eagle")}


@dataclass(frozen=True)
class Drafting:
    """A toy, and its drafting method."""

    family: Family
    folder: Path
    speculation: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)  # of the engine

    def judge(self, targets: Sequence[Target]) -> Judge:
        """Returns the outside reference for drafts of requests, each with its own target."""
        method = self.speculation["method"]
        is_inkling = self.family is checkpoints.FAMILIES["inkling_mm_model"]
        if method == "mtp" and not is_inkling:
            return MTPJudge(self.folder, targets)
        args = EngineArgs(
            model=str(self.folder),
            dtype="float32",
            speculative_config=self.speculation,
            **self.options,
        )
        config = args.create_engine_config()
        if is_inkling:
            return InklingJudge(config, self.folder, targets)
        return {"eagle3": Eagle3Judge, "dflash": DFlashJudge}[method](config, targets)


def write(folder: Path, case: str, num_drafts: int = 3) -> Drafting:
    """Writes a toy of CASES or GUESSABLE into a new folder."""
    name, method = (CASES | GUESSABLE)[case]
    family = checkpoints.FAMILIES[name]
    if name == "inkling_mm_model":
        _write_inkling(family, folder / "target", num_drafts)
        speculation = {"method": method, "num_speculative_tokens": num_drafts}
        return Drafting(family, folder / "target", speculation, family.options)
    changes = CHANGES[name] | ({"mtp_num_hidden_layers": 1} if method == "mtp" else {})
    family.write(folder / "target", few=True, **changes)
    speculation = {"method": method, "num_speculative_tokens": num_drafts}
    if method == "mtp":
        _add_mtp(folder / "target")
        return Drafting(family, folder / "target", speculation)
    text = json.loads((folder / "target" / "config.json").read_text())["text_config"]
    head = {"eagle3": _eagle3, "eagle": _eagle, "dflash": _dflash}[method](
        folder / "head", text, mrope="one axis" not in case
    )
    return Drafting(family, folder / "target", speculation | {"model": str(head)})


def write_guessable(folder: Path, case: str) -> Drafting:
    """Writes a toy of GUESSABLE: its newest token mostly determines the next.

    The head drafts from that token alone.
    """
    drafting = write(folder, case)
    _, method = GUESSABLE[case]
    own_token = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    for path in folder.glob("*/model.safetensors"):
        arrays = load_file(path)
        for key, array in arrays.items():
            of_head = path.parent.name == "head" or key.startswith("mtp.")
            if adds(key) and ("language_model" in key or of_head):
                arrays[key] = 0.0 * array if of_head else 0.02 * array
            elif key.endswith("fc.weight"):
                arrays[key] = own_token
            elif key.endswith(
                ("language_model.norm.weight", "mtp.norm.weight", "fc_norm_embedding.weight")
            ):
                arrays[key] = torch.zeros_like(array) if method == "mtp" else torch.ones_like(array)
        save_file(arrays, path, {"format": "pt"})
    return drafting


def _add_mtp(folder: Path) -> None:
    """Adds an MTP layer to a checkpoint, with norms stored minus one."""
    shapes = mtp_shapes("qwen3_5", HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE)
    arrays = {n: a - 1 if "norm" in n else a for n, a in random_arrays(shapes).items()}
    path = folder / "model.safetensors"
    save_file(load_file(path) | arrays, path, {"format": "pt"})


def _write_inkling(family: Family, folder: Path, count: int) -> None:
    """Writes a checkpoint with `count` MTP layers, the first one with a window."""
    family.write(folder, few=True)
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["text_config"] |= {"use_embed_norm": True, "use_global_scale": True}
    content["mtp_config"] = {"num_nextn_predict_layers": count, "local_layer_ids": [0]}
    path.write_text(json.dumps(content))
    text = content["text_config"]
    text |= {"dense_intermediate_size": text["intermediate_size"]}
    arrays = inkling.mtp_arrays(inkling.mtp_shapes(count, [0], False, text))
    mx.save_safetensors(str(folder / "mtp.safetensors"), arrays, {"format": "pt"})


_LLAMA = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
}


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"mrope_section": [14, 13, 13], "mrope_interleaved": True}


def _eagle3(folder: Path, text: Mapping[str, Any], mrope: bool) -> Path:
    """Writes a head with the target's embedding and head."""
    shapes = _layer("midlayer", 2 * HIDDEN) | {"fc.weight": (HIDDEN, len(TAPS) * HIDDEN)}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
    shapes |= {f"{norm}.weight": (HIDDEN,) for norm in norms}
    config = _LLAMA | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": text["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
        "num_aux_hidden_states": len(TAPS),
        "rope_parameters": _ROPE | (_MROPE if mrope else {}),
    }
    return write_head(folder, shapes, {}, config, "model.safetensors")


def _eagle(folder: Path, text: Mapping[str, Any], mrope: bool) -> Path:
    """Writes a head of EAGLE's first version."""
    shapes = _layer("layers.0", HIDDEN) | {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    config = _LLAMA | {
        "architectures": ["EagleLlamaForCausalLM"],
        "vocab_size": text["vocab_size"],
        "rope_parameters": _ROPE | (_MROPE if mrope else {}),
    }
    return write_head(folder, shapes, {}, config, "model.safetensors")


def _layer(name: str, width: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a Llama layer whose attention has inputs of `width` elements."""
    both = 2 * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.self_attn.q_proj.weight": (both, width),
        f"{name}.self_attn.k_proj.weight": (HEAD_DIM, width),
        f"{name}.self_attn.v_proj.weight": (HEAD_DIM, width),
        f"{name}.self_attn.o_proj.weight": (HIDDEN, both),
        f"{name}.mlp.gate_proj.weight": (96, HIDDEN),
        f"{name}.mlp.up_proj.weight": (96, HIDDEN),
        f"{name}.mlp.down_proj.weight": (HIDDEN, 96),
    }
    return shapes | {f"{name}.post_attention_layernorm.weight": (HIDDEN,)}


def _dflash(folder: Path, text: Mapping[str, Any], mrope: bool) -> Path:
    """Writes a block drafter with the target's embedding and head."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": HEAD_DIM}
    config = blocks.CONFIG | heads | {"hidden_size": HIDDEN, "vocab_size": text["vocab_size"]}
    taps = {"mask_token_id": DFlashJudge.mask, "target_layer_ids": [tap - 1 for tap in TAPS]}
    shapes = blocks.shapes(heads=(2, 1), size=HEAD_DIM, num_taps=len(TAPS), hidden=HIDDEN)
    return write_head(folder, shapes, {}, config | {"dflash_config": taps}, "model.safetensors")


class Target:
    """transformers' model over the text of one request with images."""

    def __init__(
        self, family: Family, folder: Path, prompt: str, images: Sequence[Any], model: Any = None
    ) -> None:
        """
        Args:
            family: family of the checkpoint.
            folder: folder of the checkpoint.
            prompt: prompt of the request.
            images: images in the prompt.
            model: replaces the checkpoint's own model, for example by PEFT's.
        """
        if model is None:
            cls = getattr(transformers, family.architecture)
            model = cls.from_pretrained(folder, dtype=torch.float32)
        self._model = model.eval()
        self._inputs = dict(
            processor(folder)(
                text=[family.for_transformers(prompt)],
                images=[list(images)] if images else None,
                return_tensors="pt",
            )
        )
        self.prompt: list[int] = self._inputs["input_ids"][0].tolist()
        self._run = cache(self._forward)

    @property
    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the embedding and the head, [V, H] each."""
        ends = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        embedding, lm_head = (end.weight.detach() for end in ends)
        return embedding, lm_head

    @property
    def _placeholders(self) -> list[int]:
        config = self._model.config
        names = ("image_token_id", "video_token_id", "audio_token_id")
        return [getattr(config, name) for name in names if hasattr(config, name)]

    @cached_property
    def _text(self) -> Any:
        return next(m for m in self._model.modules() if hasattr(m, "layers") and m.layers)

    def states(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """Returns [L + 2] of [T, H]: merged embeddings, layers' outputs and the final states."""
        return self._run(tuple(tokens))[0]

    def positions(self, tokens: Sequence[int]) -> torch.Tensor:
        """Returns [3, T]: time, height and width of each token."""
        return self._run(tuple(tokens))[1]

    def _forward(self, tokens: tuple[int, ...]) -> tuple[list[torch.Tensor], torch.Tensor]:
        assert list(tokens[: len(self.prompt)]) == self.prompt
        states: list[torch.Tensor] = []
        positions: list[torch.Tensor] = []
        with ExitStack() as stack:
            for module in (*self._text.layers, self._text.norm):
                hook = partial(_note_input, states)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            if (rotary := getattr(self._text, "rotary_emb", None)) is not None:
                hook = partial(_note_positions, positions)
                stack.callback(rotary.register_forward_pre_hook(hook, with_kwargs=True).remove)
            final = self._text.norm.register_forward_hook(
                lambda module, args, out: states.append(out[0])
            )
            stack.callback(final.remove)
            inputs, more = dict(self._inputs), len(tokens) - len(self.prompt)
            ids = torch.tensor([tokens])
            # Drafts may be ids that stand for images. Only their embeddings are read.
            special = torch.isin(ids, torch.tensor(self._placeholders))
            special[:, : len(self.prompt)] = False
            inputs["input_ids"] = torch.where(special, 0, ids)
            for name in ("attention_mask", "mm_token_type_ids"):
                if name in inputs:
                    fill = int(name == "attention_mask")
                    inputs[name] = torch.nn.functional.pad(inputs[name], (0, more), value=fill)
            with torch.inference_mode():
                self._model(**inputs)
                states = [state.clone() for state in states]
                states[0][special[0]] = self._model.get_input_embeddings()(ids[special])
            states = [state.clone() for state in states]
        return states, positions[0] if positions else torch.zeros(0)


def _note_input(states: list[torch.Tensor], module: Any, args: Any, kwargs: Any) -> None:
    states.append((args[0] if args else kwargs["hidden_states"])[0])


def _note_positions(positions: list[torch.Tensor], module: Any, args: Any, kwargs: Any) -> None:
    found = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
    positions.append(found[-3:, 0] if found.ndim == 3 else found.expand(3, -1))


class Judge:
    """Runs a head over whole requests, each at once."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets = targets

    def rows(self, request: int, text: list[int]) -> np.ndarray:
        """Returns the head's [T - 1, H] states of a text's rows."""
        raise NotImplementedError

    def __call__(self, request: int, text: list[int], drafts: list[int]) -> np.ndarray:
        """Returns the head's [len(drafts), V] logits at each draft's place behind a text."""
        raise NotImplementedError


class MTPJudge(Judge, NaiveMTP):
    """The formula in float64, with three positions per row."""

    heads, kv_heads, head_size, rotary = HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM // 2
    sections = (7, 7, 6)

    def __init__(self, folder: Path, targets: Sequence[Target]) -> None:
        Judge.__init__(self, targets)
        self.read(folder)

    def rows(self, request: int, text: list[int]) -> np.ndarray:
        target = self.targets[request]
        *states, final = (state.double().numpy() for state in target.states(text))
        positions = target.positions(text).numpy()
        return self.layer(states[0][1:], final[:-1], self._turns(positions[:, :-1]))

    def __call__(self, request: int, text: list[int], drafts: list[int]) -> np.ndarray:
        target = self.targets[request]
        embeds, *_, final = (s.double().numpy() for s in target.states([*text, *drafts]))
        positions, hidden = target.positions([*text, *drafts]).numpy(), final[: len(text) - 1]
        found = []
        for _ in drafts:
            count = len(hidden)
            out = self.layer(embeds[1 : count + 1], hidden, self._turns(positions[:, :count]))
            found.append(self.lm_head @ out[-1])
            hidden = np.concatenate([hidden, out[-1:]])
        return np.stack(found)

    def _turns(self, positions: np.ndarray) -> np.ndarray:
        """Returns [T, rotary / 2] angles of [3, T] positions: of three pairs, one per axis."""
        half = self.rotary // 2
        axes = np.zeros(half, int)
        for axis in (1, 2):
            axes[axis : 3 * self.sections[axis] : 3] = axis
        frequencies = 10000.0 ** (-np.arange(half) / half)
        turns: np.ndarray = positions.T[:, axes] * frequencies
        return turns


class InklingJudge(Judge):
    """Runs vLLM's own torch class."""

    def __init__(self, config: Any, folder: Path, targets: Sequence[Target]) -> None:
        super().__init__(targets)
        self._config = config
        self._module = inkling.module_of(config, folder, *targets[0].ends)

    def __call__(self, request: int, text: list[int], drafts: list[int]) -> np.ndarray:
        embeds, *_, final = self.targets[request].states([*text, *drafts])
        hidden, found = final[: len(text) - 1], []
        with inkling.of_torch(self._config):
            for index in range(len(drafts)):
                read = embeds[1 + index : len(text) + index]
                hidden = self._module(None, None, hidden, inputs_embeds=read, spec_step_idx=index)
                found.append(self._module.compute_logits(hidden[-1:])[0])
        return torch.stack(found).numpy()


class Eagle3Judge(Judge):
    """Runs vLLM's own torch class."""

    def __init__(self, config: Any, targets: Sequence[Target]) -> None:
        super().__init__(targets)
        self._config = config
        draft = config.speculative_config.draft_model_config
        self._axes = 3 if draft.uses_mrope else 1
        weights = loader.load_weights(draft, config)
        weights = {name: torch.tensor(np.array(array)) for name, array in weights.items()}
        self._module = vllm_module(Eagle3LlamaForCausalLM, config, weights)
        _, lm_head = targets[0].ends
        self._module.lm_head.weight.data[: len(lm_head)] = lm_head

    def rows(self, request: int, text: list[int]) -> np.ndarray:
        target = self.targets[request]
        states, positions = target.states(text), target.positions(text)
        return self._run(states, positions, self._hidden(states)[:-1])[0].numpy()

    @torch.no_grad()
    def __call__(self, request: int, text: list[int], drafts: list[int]) -> np.ndarray:
        target = self.targets[request]
        states = target.states([*text, *drafts])
        positions = target.positions([*text, *drafts])
        hidden, found = self._hidden(states)[: len(text) - 1], []
        for _ in drafts:
            out, carried = self._run(states, positions, hidden)
            with one_process(), set_current_vllm_config(self._config):
                found.append(self._module.compute_logits(out[-1:])[0])
            hidden = torch.cat([hidden, carried[-1:]])
        return torch.stack(found).numpy()

    @torch.no_grad()
    def _hidden(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        taps = torch.cat([states[tap] for tap in TAPS], dim=-1)
        return self._module.combine_hidden_states(taps)

    @torch.no_grad()
    def _run(
        self, states: Sequence[torch.Tensor], positions: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(hidden)
        at = positions[:, :count] if self._axes == 3 else positions[0, :count]
        with one_process(), set_current_vllm_config(self._config):
            out, carried = self._module(None, at, hidden, inputs_embeds=states[0][1 : count + 1])
        return out, carried


class DFlashJudge(blocks.Judge):
    """Runs vLLM's own torch class, with the tokens' indices as positions."""

    taps, mask = tuple(tap - 1 for tap in TAPS), 9

    def __init__(self, config: Any, targets: Sequence[Target]) -> None:
        super().__init__(config, targets[0], DFlashQwen3ForCausalLM)
        self.targets = targets

    def __call__(self, request: int, text: list[int], drafts: list[int]) -> np.ndarray:
        self.target = self.targets[request]
        found: np.ndarray = super().__call__(text, drafts)
        return found
