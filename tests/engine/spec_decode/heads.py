# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a small target and heads on it, and vLLM's own torch modules as reference."""

import importlib
import json
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from e2e.harness import Dense, counters, engine, generate, greedy
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.base import create_attention_mask
from mlx_lm.utils import load_model
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

from vllm_metal.engine.attention.layers import attention_layers
from vllm_metal.engine.batch.requests import BlockTables
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.models import loader, parts
from vllm_metal.engine.models.compiled import Graphs
from vllm_metal.engine.models.executor import ModelExecutor
from vllm_metal.engine.spec_decode.network import DraftPool
from vllm_metal.engine.spec_decode.proposer import DraftRequest
from vllm_metal.engine.spec_decode.registry import load_network
from vllm_metal.engine.spec_decode.spans import Spans

VOCAB, HIDDEN, LAYERS, MAX_LEN, K = 128, 64, 8, 144, 4
NUM_BLOCKS = 90  # enough for all tests that share a bench
BLOCK, MAX_NUM_REQS = 16, 4
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


#: vLLM's classes, whose attention is replaced.
MODULES = ["llama", "qwen2", "glm4_moe", "exaone_moe"]
#: 8 bits per weight, as mlx-lm's converter writes it.
QUANTIZATION = {"group_size": 32, "bits": 8, "mode": "affine"}


def write_target(folder: Path, config=CONFIG, extra=(), quantized=False) -> Path:
    """Writes an mlx-lm model with random weights, and other arrays beside them."""
    folder.mkdir()
    mx.random.seed(1)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))

    def varied(name, array):
        if "norm" in name:
            return array * (1 + 0.3 * mx.random.normal(array.shape))
        # Large weights around attention make hidden states depend on all before them.
        return 3 * array if "self_attn" in name else array

    weights = tree_map_with_path(varied, model.parameters())
    if quantized:
        model.update(weights)
        nn.quantize(model, **QUANTIZATION)
        weights = model.parameters()
        config = config | {"quantization": QUANTIZATION, "quantization_config": QUANTIZATION}
    (folder / "config.json").write_text(json.dumps(config))
    arrays = dict(tree_flatten(weights)) | dict(extra)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    return folder


def random_arrays(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Returns random weights of these shapes, with norms around one."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else 0.15)
        + (1 if len(shape) == 1 and "norm" in name else 0)
        for name, shape in shapes.items()
    }


def write_head(folder: Path, shapes: dict[str, tuple[int, ...]], extra, config, file: str) -> Path:
    """Writes a head with random weights of these shapes, and other arrays."""
    folder.mkdir()
    weights = random_arrays(shapes) | extra
    if file.endswith("safetensors"):
        save_file(weights, str(folder / file))
    else:
        torch.save(weights, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def engine_config(target: Path, head: Path, method: str, **options):
    args = EngineArgs(
        model=str(target),
        skip_tokenizer_init=True,
        max_model_len=MAX_LEN,
        speculative_config={"method": method, "model": str(head), "num_speculative_tokens": K},
        **options,
    )
    return args.create_engine_config()


class NaiveAttention(torch.nn.Module):
    """Replaces vLLM's, which needs a cache: one whole sequence."""

    def __init__(
        self, num_heads, head_size, scale, num_kv_heads, per_layer_sliding_window=None, **_
    ):
        super().__init__()
        self.window = per_layer_sliding_window or 10**6
        self.size, self.scale, self.repeats = head_size, scale, num_heads // num_kv_heads

    def forward(self, queries, keys, values):
        num_rows = len(queries)
        heads = [x.view(num_rows, -1, self.size).transpose(0, 1) for x in (queries, keys, values)]
        queries, keys, values = heads[0], *(h.repeat_interleave(self.repeats, 0) for h in heads[1:])
        scores = queries @ keys.transpose(1, 2) * self.scale
        ago = torch.arange(num_rows)[:, None] - torch.arange(num_rows)
        scores = scores.masked_fill((ago < 0) | (ago >= self.window), -1e30)
        return (scores.softmax(-1) @ values).transpose(0, 1).reshape(num_rows, -1)


@contextmanager
def one_process():
    """Sets the part of vLLM's distributed state that its layers need."""
    alone = SimpleNamespace(
        rank_in_group=0, world_size=1, rank=0, is_first_rank=True, is_last_rank=True
    )
    with ExitStack() as stack:
        for group in ("_TP", "_PP"):
            stack.enter_context(mock.patch(f"vllm.distributed.parallel_state.{group}", alone))
        for module in MODULES:
            name = f"vllm.model_executor.models.{module}.Attention"
            stack.enter_context(mock.patch(name, NaiveAttention))
        yield


def vllm_module(family, config, weights):
    """Returns vLLM's torch module with the checkpoint's weights."""
    with one_process(), set_current_vllm_config(config), torch.no_grad():
        module = family(vllm_config=config)
        module.load_weights(weights.items())
    return module


class DenseTarget:
    """mlx-lm's own dense target, with its hidden states."""

    def __init__(self, folder: Path) -> None:
        self.model, _ = load_model(folder, strict=False)  # mlx-lm drops one MTP layer at most

    @property
    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the embedding and the head, [V, H] each."""
        ends = self.model.model.embed_tokens.weight, self.model.lm_head.weight
        embedding, lm_head = (torch.tensor(np.array(each)) for each in ends)
        return embedding, lm_head

    def states(self, tokens) -> list[torch.Tensor]:
        """Returns [L + 2] of [T, H]: the embedding, each layer's output and the final states."""
        inner = self.model.model
        hidden = inner.embed_tokens(mx.array([list(tokens)]))
        found = [hidden]
        for layer in inner.layers:
            window = inner.window_size if getattr(layer, "is_sliding_window", False) else None
            mask = create_attention_mask(hidden, None, window_size=window)
            found.append(layer(found[-1], mask))
        found.append(inner.norm(found[-1]))
        return [torch.tensor(np.array(states[0])) for states in found]


class Gemma4Target(DenseTarget):
    """Gemma 4, whose scaled embedding is also the head."""

    @property
    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        embedding = torch.tensor(np.array(self.model.model.embed_tokens.weight))
        return embedding * embedding.shape[1] ** 0.5, embedding

    def states(self, tokens) -> list[torch.Tensor]:
        inner, found = self.model.model, []
        family = type(inner.layers[0])
        call = family.__call__

        def noting(layer, hidden, *args, **options):
            out = call(layer, hidden, *args, **options)
            found.append(out[0] if found else [hidden, out[0]])
            return out

        with mock.patch.object(family, "__call__", noting):
            final = inner(mx.array([list(tokens)]))
        (first, *others) = found
        return [torch.tensor(np.array(states[0])) for states in (*first, *others, final)]


def serve_and_check(target: Path, speculative_config, **options) -> None:
    """Serves random prompts twice: greedily, and at random, so that some drafts are right."""
    rng = np.random.default_rng(4)
    config = json.loads((target / "config.json").read_text())
    vocab_size = config.get("text_config", config)["vocab_size"]
    prompts = [rng.integers(0, vocab_size, length).tolist() for length in (1, 17, 40, 64)]
    dense = Dense(str(target))
    with engine(
        str(target),
        skip_tokenizer_init=True,
        max_model_len=128,
        speculative_config=speculative_config,
        additional_config={"fixed_draft_length": True},
        **options,
    ) as llm:
        for _ in range(2):
            outputs = generate(llm, prompts, greedy(24, detokenize=False))
            for prompt, tokens in zip(prompts, outputs, strict=True):
                dense.check(prompt, tokens)
        wild = {"temperature": 2.0, "seed": 1, "ignore_eos": True, "detokenize": False}
        generate(llm, prompts, SamplingParams(max_tokens=48, **wild))
        seen = counters(llm)
    assert seen["vllm:spec_decode_num_draft_tokens"] > 2 * 4 * 24
    assert seen["vllm:spec_decode_num_accepted_tokens"] > 0
    assert seen["vllm:prefix_cache_hits"] > 0


class Bench:
    """The target in steps, and the proposer beside it, over one set of blocks."""

    def __init__(self, config, judge):
        """`judge(text, drafts)` returns the [len(drafts), V] logits of each draft's place."""
        self.rng = np.random.default_rng(2)
        self.judge = judge
        model = loader.load(config)
        layers = attention_layers(model, loader.model_type(config))
        target = parts.ModelParts(model)
        network = load_network(config, target)
        network.profile(SCATTER)  # as the planner does, before there is a pool
        everything = [*layers, *network.layers]
        kv_caches = {
            layer.name: layer.allocate(NUM_BLOCKS, BLOCK, mx.float32, SCATTER)
            for layer in everything
        }
        group_of = dict.fromkeys(kv_caches, 0)
        in_forward = [*layers, *network.context_layers]
        self.executor = ModelExecutor(target, in_forward, kv_caches, group_of, BLOCK)
        self.network, self.kv_caches, self.group_of = network, kv_caches, group_of
        self.tables = BlockTables(1, MAX_NUM_REQS, MAX_LEN // BLOCK + 1)
        self.graphs = Graphs()
        self.proposer = network.proposer(DraftPool(kv_caches, group_of, self.tables, self.graphs))
        self.free = self.rng.permutation(np.arange(1, NUM_BLOCKS)).tolist()
        self.token_ids_np = np.zeros((MAX_NUM_REQS, MAX_LEN), np.int32)
        self.known = np.zeros(MAX_NUM_REQS, np.int32)
        self.computed = np.zeros(MAX_NUM_REQS, np.int32)

    def prompt(self, length):
        return self.rng.integers(0, VOCAB, length).tolist()

    def begin(self, req_idx, tokens, shared=()):
        own = [self.free.pop() for _ in range(MAX_LEN // BLOCK - len(shared))]
        self.tables.replace(req_idx, [[*shared, *own]])
        self.token_ids_np[req_idx, : len(tokens)] = tokens
        self.known[req_idx], self.computed[req_idx] = len(tokens), len(shared) * BLOCK
        self.proposer.begin_request(req_idx, len(shared) * BLOCK)

    def request(self, req_indices, limits, chunk=MAX_LEN):
        """Returns the proposer's request of a step."""
        req_indices = np.array(req_indices, np.int32)
        ends = np.minimum(self.known[req_indices], self.computed[req_indices] + chunk)
        return DraftRequest(self.token_ids_np, req_indices, ends, np.array(limits, np.int32))

    def step(self, req_indices, limits, chunk=MAX_LEN):
        """Proposes, checks and verifies drafts with any outcome; returns [R] counts."""
        req_indices = np.array(req_indices, np.int32)
        request = self.request(req_indices, limits, chunk)
        ends, proposed = request.num_tokens_np, self.proposer.propose(request)
        counts = proposed.counts_np
        drafts = [
            row[:count] for row, count in zip(np.array(proposed.token_ids), counts, strict=True)
        ]
        for req_idx, of_request in zip(req_indices, drafts, strict=True):
            self.check(req_idx, of_request.tolist())
        text = self.token_ids_np.copy()
        for req_idx, of_request in zip(req_indices, drafts, strict=True):
            text[req_idx, self.known[req_idx] : self.known[req_idx] + len(of_request)] = of_request
        spans = Spans(req_indices, self.computed[req_indices], ends + counts)
        ids = mx.array(text[spans.req_indices_np[spans.index_np], spans.positions_np])
        num_drafts_np = counts.astype(np.int32) if counts.any() else None
        rows = replace(spans.rows(ids, mx.array([0])), num_drafts_np=num_drafts_np)
        logits = self.executor.forward(rows, self.tables)
        self.proposer.take_hidden(rows)
        mx.eval(logits)
        accepted = [
            self.learn(req_idx, end, of_request.tolist())
            for req_idx, end, of_request in zip(req_indices, ends, drafts, strict=True)
        ]
        if self.executor.keeps_states:
            self.executor.record_accepted(
                rows, spans.query_start_loc_np[1:] - 1 - counts + accepted
            )
        return counts.tolist()

    def check(self, req_idx, drafts):
        if drafts:
            text = self.token_ids_np[req_idx, : self.known[req_idx]].tolist()
            for row, token in zip(self.judge(text, drafts), drafts, strict=True):
                assert row.max() - row[token] <= TIE

    def learn(self, req_idx, end, drafts):
        """Draws and returns the number of accepted drafts."""
        if end < self.known[req_idx]:  # within its prompt
            self.computed[req_idx] = end
            return 0
        accepted = int(self.rng.integers(0, len(drafts) + 1))
        new = [*drafts[:accepted], int(self.rng.integers(0, VOCAB))]
        if accepted < len(drafts) and new[-1] == drafts[accepted]:
            new[-1] = (new[-1] + 1) % VOCAB
        start = self.known[req_idx]
        self.token_ids_np[req_idx, start : start + len(new)] = new
        self.known[req_idx] += len(new)
        self.computed[req_idx] = self.known[req_idx] - 1
        return accepted


def check_chunks_and_rejections(bench: Bench, found: int, at_once: bool = False) -> None:
    """Runs two prompts in chunks, a hit of `found` blocks, and drafts rejected anywhere.

    at_once: whether a request drafts in its first step after a hit.
    """
    prefix = bench.prompt(3 * BLOCK)
    bench.begin(0, prefix + bench.prompt(3))
    bench.begin(1, bench.prompt(2))
    assert bench.step([0, 1], [0, 0], chunk=20) == [0, 0]
    counts = [bench.step([1, 0], [K, 0], chunk=20) for _ in range(2)]  # beside a prompt
    assert counts == [[K, 0], [K, 0]]
    bench.step([0, 1], [0, 2])
    shared = bench.tables.tables_np[0][0, :found].tolist()
    bench.begin(2, prefix + bench.prompt(5), shared)
    assert bench.step([2], [0]) == [0]
    if at_once:
        assert bench.step([2], [K]) == [K]
    drafted = 0
    for number in range(6):
        some = bench.rng.permutation(3)[: 2 if number % 3 else 3]  # now and then one sits out
        drafted += sum(bench.step(some, bench.rng.integers(0, K + 1, len(some))))
    assert drafted > 15
