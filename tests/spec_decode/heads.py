# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a small target and of heads on it, and vLLM's own torch modules to judge them."""

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask
from mlx_lm.utils import load_model
from safetensors.torch import save_file
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

from vllm_metal.kv_cache.scatter import ScatterRegion
from vllm_metal.models import loader
from vllm_metal.models.executor import ModelExecutor
from vllm_metal.models.layers import attention_layers
from vllm_metal.requests import BlockTables
from vllm_metal.spec_decode.model import Spans
from vllm_metal.spec_decode.networks import load_network

VOCAB, HIDDEN, LAYERS, MAX_LEN, K = 128, 64, 8, 144, 4
BLOCK, SLOTS = 16, 4
TIE = 1e-3  # of two logits, which range over some 10; torch and MLX sum in other orders
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def write_target(folder: Path) -> Path:
    folder.mkdir()
    mx.random.seed(1)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    # Large weights around attention make hidden states depend on all before them.
    weights = tree_map_with_path(
        lambda name, array: 3 * array if "self_attn" in name else array, model.parameters()
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(weights)), {"format": "mlx"}
    )
    return folder


def write_head(folder: Path, shapes: dict[str, tuple[int, ...]], extra, config, file: str) -> Path:
    """Random weights of these shapes, norms around one."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else 0.15)
        + (1 if len(shape) == 1 and "norm" in name else 0)
        for name, shape in shapes.items()
    } | extra
    if file.endswith("safetensors"):
        save_file(weights, str(folder / file))
    else:
        torch.save(weights, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def engine_config(target: Path, head: Path, method: str):
    args = EngineArgs(
        model=str(target),
        skip_tokenizer_init=True,
        max_model_len=MAX_LEN,
        speculative_config={"method": method, "model": str(head), "num_speculative_tokens": K},
    )
    return args.create_engine_config()


class NaiveAttention(torch.nn.Module):
    """In place of vLLM's, which needs a cache: one sequence, all of it."""

    def __init__(self, num_heads, head_size, scale, num_kv_heads, **_):
        super().__init__()
        self.size, self.scale, self.repeats = head_size, scale, num_heads // num_kv_heads

    def forward(self, queries, keys, values):
        num_rows = len(queries)
        heads = [x.view(num_rows, -1, self.size).transpose(0, 1) for x in (queries, keys, values)]
        queries, keys, values = heads[0], *(h.repeat_interleave(self.repeats, 0) for h in heads[1:])
        scores = queries @ keys.transpose(1, 2) * self.scale
        scores = scores.masked_fill(torch.ones(num_rows, num_rows).triu(1).bool(), -1e30)
        return (scores.softmax(-1) @ values).transpose(0, 1).reshape(num_rows, -1)


@contextmanager
def one_process():
    """As much of vLLM's distributed state as its layers ask for."""
    alone = SimpleNamespace(
        rank_in_group=0, world_size=1, rank=0, is_first_rank=True, is_last_rank=True
    )
    with (
        mock.patch("vllm.distributed.parallel_state._TP", alone),
        mock.patch("vllm.distributed.parallel_state._PP", alone),
        mock.patch("vllm.model_executor.models.llama.Attention", NaiveAttention),
    ):
        yield


def vllm_module(family, config, weights):
    """vLLM's torch module with the checkpoint's weights."""
    with one_process(), set_current_vllm_config(config), torch.no_grad():
        module = family(vllm_config=config)
        module.load_weights(weights.items())
    return module


class DenseTarget:
    """mlx-lm's own dense target, which shows its hidden states."""

    def __init__(self, folder: Path) -> None:
        self.model, _ = load_model(folder)

    def states(self, tokens) -> list[torch.Tensor]:
        """[L + 2] of [T, H]: the embedding, what each layer passes on, the final states."""
        inner = self.model.model
        hidden = inner.embed_tokens(mx.array([list(tokens)]))
        mask = create_attention_mask(hidden, None)
        found = [hidden]
        for layer in inner.layers:
            found.append(layer(found[-1], mask))
        found.append(inner.norm(found[-1]))
        return [torch.tensor(np.array(states[0])) for states in found]


class Bench:
    """The target in steps and the proposer beside it, over one set of blocks."""

    def __init__(self, config, judge):
        """`judge(text, drafts)` gives the logits, [len(drafts), V], of each draft's place."""
        self.rng = np.random.default_rng(2)
        self.judge = judge
        model = loader.load(config)
        layers = attention_layers(model, "llama")
        selected = loader.SelectedRows(model)
        network = load_network(config, model, selected)
        everything = [*layers, *network.layers]
        regions = {
            layer.name: ScatterRegion(60, BLOCK, layer.num_kv_heads, layer.head_size, mx.float32)
            for layer in everything
        }
        group_of = dict.fromkeys(regions, 0)
        self.executor = ModelExecutor(model, selected, layers, regions, group_of, BLOCK)
        self.tables = BlockTables(1, SLOTS, MAX_LEN // BLOCK + 1)
        self.proposer = network.proposer(regions, group_of, self.tables)
        self.free = self.rng.permutation(np.arange(1, 60)).tolist()
        self.token_ids_np = np.zeros((SLOTS, MAX_LEN), np.int32)
        self.known = np.zeros(SLOTS, np.int32)
        self.computed = np.zeros(SLOTS, np.int32)

    def prompt(self, length):
        return self.rng.integers(0, VOCAB, length).tolist()

    def begin(self, slot, tokens, shared=()):
        own = [self.free.pop() for _ in range(MAX_LEN // BLOCK - len(shared))]
        self.tables.replace(slot, [[*shared, *own]])
        self.token_ids_np[slot, : len(tokens)] = tokens
        self.known[slot], self.computed[slot] = len(tokens), len(shared) * BLOCK
        self.proposer.begin(slot, len(shared) * BLOCK)

    def step(self, slots, limits, chunk=MAX_LEN):
        """One step: drafts are proposed, checked and verified with any outcome; [R] counts."""
        slots = np.array(slots, np.int32)
        ends = np.minimum(self.known[slots], self.computed[slots] + chunk)
        proposed = self.proposer.propose(self.token_ids_np, slots, ends, np.array(limits, np.int32))
        counts = proposed.counts_np
        drafts = [
            row[:count] for row, count in zip(np.array(proposed.token_ids), counts, strict=True)
        ]
        for slot, of_request in zip(slots, drafts, strict=True):
            self.check(slot, of_request.tolist())
        text = self.token_ids_np.copy()
        for slot, of_request in zip(slots, drafts, strict=True):
            text[slot, self.known[slot] : self.known[slot] + len(of_request)] = of_request
        spans = Spans(slots, self.computed[slots], ends + counts)
        ids = mx.array(text[spans.slots_np[spans.index_np], spans.positions_np])
        rows = spans.rows(ids, np.array([0]))
        logits = self.executor.forward(rows, self.tables)
        self.proposer.take_hidden(rows)
        mx.eval(logits)
        for slot, end, of_request in zip(slots, ends, drafts, strict=True):
            self.learn(slot, end, of_request.tolist())
        return counts.tolist()

    def check(self, slot, drafts):
        if drafts:
            text = self.token_ids_np[slot, : self.known[slot]].tolist()
            for row, token in zip(self.judge(text, drafts), drafts, strict=True):
                assert row.max() - row[token] <= TIE

    def learn(self, slot, end, drafts):
        if end < self.known[slot]:  # within its prompt
            self.computed[slot] = end
            return
        accepted = int(self.rng.integers(0, len(drafts) + 1))
        new = [*drafts[:accepted], int(self.rng.integers(0, VOCAB))]
        if accepted < len(drafts) and new[-1] == drafts[accepted]:
            new[-1] = (new[-1] + 1) % VOCAB
        start = self.known[slot]
        self.token_ids_np[slot, start : start + len(new)] = new
        self.known[slot] += len(new)
        self.computed[slot] = self.known[slot] - 1
