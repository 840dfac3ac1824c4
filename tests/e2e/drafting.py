# SPDX-License-Identifier: Apache-2.0
"""Toy engines with networks that draft, and their drafts, acceptances and files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from e2e.disk import LIMIT, pages
from e2e.harness import counters, engine, free_blocks, run_out
from engine.spec_decode import assistants, blocks, inkling
from engine.spec_decode.heads import CONFIG, HIDDEN, write_head, write_target
from engine.spec_decode.hybrids import write_hybrid
from engine.spec_decode.test_eagle import eagle3_shapes, layer_shapes
from engine.spec_decode.test_mlp_speculator import config_json as mlp_speculator_config
from engine.spec_decode.test_mlp_speculator import shapes as mlp_speculator_shapes
from engine.spec_decode.test_mtp import CASES
from engine.spec_decode.test_mtp import write as write_mtp
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from vllm_metal.engine.spec_decode.speculator import Speculator
from vllm_metal.kv_transfer.disk.block_file import HEADER_BYTES

BLOCK, NUM_DRAFTS = 16, 3
VOCAB = 32  # small enough that random drafts are sometimes right
FEW = 8  # small enough for that in short runs
METHODS = ("draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark")
STATELESS = ("medusa", "mlp_speculator")  # heads without K/V


@dataclass(frozen=True)
class Toy:
    """A model and its draft network."""

    model: str
    speculation: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)  # of the engine


def write_toys(folder: Path, for_kernels: bool = False) -> dict[str, Toy]:
    """Writes a toy for each of METHODS and STATELESS, with random weights.

    Args:
        folder: target folder.
        for_kernels: use one head of 64 elements, which the kernels support, instead of small ones,
            and FEW tokens. This adds: "windowed", MTP with a window on every other layer;
            "several", an MTP layer per draft; "inkling", the same with convolutions, of a model
            with states; "assistant", Gemma 4's; "hybrid", MTP of a model with recurrent layers;
            "hybrid, draft model" and "hybrid, dflash".
    """
    vocab = FEW if for_kernels else VOCAB
    small: dict[str, Any] = {"vocab_size": vocab}
    if for_kernels:
        small |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}

    def sized(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        if not for_kernels:
            return shapes
        ends = ("k_proj.weight", "v_proj.weight", "q_norm.weight", "k_norm.weight")
        return {
            name: (64, *shape[1:]) if name.endswith(ends) else shape
            for name, shape in shapes.items()
        }

    target = write_target(folder / "target", CONFIG | small)
    drafts = {
        "draft_model": write_target(folder / "draft", CONFIG | small | {"num_hidden_layers": 2}),
        "eagle": write_head(
            folder / "eagle",
            sized(layer_shapes("layers.0", HIDDEN)) | {"fc.weight": (HIDDEN, 2 * HIDDEN)},
            {},
            CONFIG | small | {"num_hidden_layers": 1},
            "model.safetensors",
        ),
        "eagle3": write_head(
            folder / "eagle3",
            sized(eagle3_shapes()) | {"lm_head.weight": (vocab, HIDDEN)},
            {},
            CONFIG | small | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]},
            "model.safetensors",
        ),
        "medusa": write_head(
            folder / "medusa",
            {f"blocks.{head}.layers.0.weight": (HIDDEN, HIDDEN) for head in range(NUM_DRAFTS)}
            | {f"lm_heads.{head}.weight": (vocab, HIDDEN) for head in range(NUM_DRAFTS)},
            {},
            small
            | {"model_type": "medusa", "hidden_size": HIDDEN}
            | {"num_heads": NUM_DRAFTS, "num_hidden_layers": 1},
            "model.safetensors",
        ),
        "mlp_speculator": write_head(
            folder / "mlp_speculator",
            mlp_speculator_shapes(NUM_DRAFTS, NUM_DRAFTS, vocab=vocab),
            {},
            mlp_speculator_config(NUM_DRAFTS, vocab_size=vocab),
            "model.safetensors",
        ),
    }
    drafts |= {name: _block_drafter(folder, name, small) for name in ("dflash", "dspark")}
    common = {"num_speculative_tokens": NUM_DRAFTS}
    toys = {
        method: Toy(str(target), common | {"method": method, "model": str(path)})
        for method, path in drafts.items()
    }
    of_target = {"mtp": "glm4_moe"}
    if for_kernels:
        of_target |= {"windowed": "exaone_moe, windowed", "several": "exaone_moe, several layers"}
    for name, case in of_target.items():
        config, shapes, *_ = CASES[case]
        model = write_mtp(folder / name, config | small, sized(shapes))
        toys[name] = Toy(str(model), common | {"method": "mtp"})
    if for_kernels:
        model, drafter = assistants.write_pair(folder, vocab)
        toys["assistant"] = Toy(str(model), common | {"method": "mtp", "model": str(drafter)})
        hybrid = str(write_hybrid(folder / "hybrid", "qwen3_next", **small))
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
        changes = heads | {f"swa_{key}": value for key, value in heads.items()}
        changes |= {"swa_num_key_value_heads": 2, "unpadded_vocab_size": vocab}
        model = inkling.write_inkling(folder / "inkling", NUM_DRAFTS, changes=changes)
        toys["inkling"] = Toy(str(model), common | {"method": "mtp"}, inkling.TEXT_ALONE)
        toys["hybrid"] = Toy(hybrid, common | {"method": "mtp"})
        toys["hybrid, draft model"] = Toy(hybrid, toys["draft_model"].speculation)
        drafter = _block_drafter(folder, "dflash", small, "hybrid-dflash", (0, 3))
        toys["hybrid, dflash"] = Toy(hybrid, toys["dflash"].speculation | {"model": str(drafter)})
    return toys


def _block_drafter(
    folder: Path,
    method: str,
    small: Mapping[str, Any],
    name: str | None = None,
    taps: Sequence[int] = blocks.TAPS,
) -> Path:
    """Writes two layers, one with a window, configured like z-lab's drafters."""
    heads = small.get("num_attention_heads", 4), small.get("num_key_value_heads", 2)
    size, vocab = small.get("head_dim", 16), small["vocab_size"]
    shapes = blocks.shapes(heads=heads, size=size, num_taps=len(taps))
    config = blocks.CONFIG | small | {"sliding_window": 24, "use_sliding_window": True}
    config |= {"layer_types": ["sliding_attention", "full_attention"]}
    config |= {"dflash_config": {"mask_token_id": vocab - 1, "target_layer_ids": list(taps)}}
    if method == "dspark":
        config |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": 8, "block_size": 7}
        shapes |= {f"markov_head.markov_w{n}.weight": (vocab, 8) for n in (1, 2)}
    return write_head(folder / (name or method), shapes, {}, config, "model.safetensors")


def transfer(folder: Path, role: str = "kv_both", **extra: Any) -> KVTransferConfig:
    """Returns the --kv-transfer-config of an engine that stores its pages in a folder."""
    return KVTransferConfig(
        kv_connector="MetalKVConnector",
        kv_role=role,
        kv_connector_extra_config={"path": str(folder), "bytes": LIMIT, **extra},
    )


@contextmanager
def drafting_engine(toy: Toy, folder: Path | None, role: str = "kv_both", **options: Any):
    """Runs an engine of a toy; checks at the end that no block is in use."""
    settings: dict[str, Any] = {
        "max_model_len": 256,
        "kv_cache_memory_bytes": 8 << 20,
        "skip_tokenizer_init": True,
        "additional_config": {"fixed_draft_length": True, "prompt_lookup": False},
        "speculative_config": toy.speculation,
    }
    if folder is not None:
        settings["kv_transfer_config"] = transfer(folder, role)
    with engine(toy.model, **(settings | toy.options | options)) as llm:
        free = free_blocks(llm)
        yield llm
        run_out(llm)
        assert free_blocks(llm) == free, "blocks were never freed"


def answer(llm: LLM, prompts: Sequence[list[int]], max_tokens: int, **options: Any):
    """Returns the tokens generated for prompts sent at once."""
    params = SamplingParams(
        **{"temperature": 0, "ignore_eos": True, "detokenize": False, "max_tokens": max_tokens}
        | options
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    run_out(llm)
    return [list(output.outputs[0].token_ids) for output in outputs]


def payloads(folder: Path) -> dict[str, bytes]:
    """Maps keys of pages on disk to their contents."""
    return {path.stem: path.read_bytes()[HEADER_BYTES:] for path in pages(folder)}


@dataclass
class Drafted:
    """Drafts of an engine. steps: for each verifying step, drafts by request index.
    num_copied: steps in which a request copies its own text."""

    steps: list[list[list[int]]] = field(default_factory=list)
    num_copied: int = 0

    def take(self) -> list[list[list[int]]]:
        """Returns the drafts since the last call."""
        taken, self.steps = self.steps, []
        return taken


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drafted]:
    """Records the drafts of all engines that run in the block."""
    drafted = Drafted()
    step_drafts = Speculator.step_drafts

    def noting(self: Speculator, *arguments: Any) -> Any:
        found = step_drafts(self, *arguments)
        lists = list(self.laid_out_drafts().values())
        if any(lists):
            drafted.steps.append(lists)
        drafted.num_copied += found.copied_np is not None
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Speculator, "step_drafts", noting)
        yield drafted


def draft_counts(llm: LLM) -> tuple[float, float]:
    """Returns the numbers of verified and accepted drafts so far."""
    found = counters(llm)
    name = "vllm:spec_decode_num_{}_tokens"
    return found.get(name.format("draft"), 0), found.get(name.format("accepted"), 0)
