# SPDX-License-Identifier: Apache-2.0
"""Drives an engine in this process step by step, with or without a disk prefix cache."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm_metal.device import blas
from vllm_metal.settings import envs

if envs.requested_device() == "cpu":
    blas.load()  # comes before MLX

import mlx.core as mx
from mlx.utils import tree_flatten
from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams
from vllm.v1.request import RequestStatus

TOY_VOCABULARY = 256
#: A long context without much compute: attention over 32,000 tokens takes half a
#: minute on two cores.
TOY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": TOY_VOCABULARY,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
_POLL_S = 0.001  # how long vLLM's server waits after a step without work


def write_toy(folder: Path) -> str:
    """Writes a model folder with random weights; returns its path."""
    from mlx_lm.models import llama

    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(TOY))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TOY))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return str(folder)


@dataclass(frozen=True)
class Answer:
    """Metrics of a request's first token."""

    seconds: float  # since the request was added
    cpu_seconds: float  # all threads of the process
    cached_tokens: int  # prompt tokens found in memory or on disk
    disk_tokens: int  # those found on disk


class Engine:
    """One engine; times are wall-clock."""

    def __init__(
        self,
        model: str,
        context: int,
        pool_bytes: int,
        disk: Path | None,
        max_step_ms: float | None = None,
        prefix_caching: bool = True,
    ) -> None:
        """
        Args:
            model: model folder.
            context: maximum tokens of a request.
            pool_bytes: size of the KV cache in memory.
            disk: folder of the disk prefix cache; None: no disk cache.
            max_step_ms: --additional-config max_step_ms; None: no limit for chunks beside streams.
            prefix_caching: enables the prefix cache in memory.
        """
        on_disk = {
            "prefix_cache_dir": str(disk),
            "prefix_cache_bytes": "16GB",
            "prefix_cache_daily_writes": "unlimited",
        }
        self._llm = LLM(
            model,
            skip_tokenizer_init=True,
            max_model_len=context,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            kv_cache_memory_bytes=pool_bytes,
            enable_prefix_caching=prefix_caching,
            disable_log_stats=False,
            seed=0,
            additional_config={"max_step_ms": max_step_ms} | (on_disk if disk is not None else {}),
        )
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._numbers = itertools.count()
        self._core.step_fn = _pausing(self._core.step_fn, self._scheduler.has_requests)

    def add(self, prompt: Sequence[int], max_tokens: int = 1) -> str:
        """Adds a request; returns its id."""
        name = f"{next(self._numbers)}"
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        return name

    def step(self) -> dict[str, int]:
        """Runs a step; maps ids of requests with new tokens to their token counts."""
        return {
            output.request_id: len(output.outputs[0].token_ids) for output in self._engine.step()
        }

    def is_loading(self, name: str) -> bool:
        """Returns whether pages of the request are being loaded from disk."""
        for request_id, request in self._scheduler.requests.items():
            if request_id.split("-")[0] == name:
                return request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        return False

    def first_token(self, prompt: Sequence[int]) -> Answer:
        """Runs a request alone; returns metrics of its single token."""
        return self.complete(prompt, 1)[0]

    def complete(self, prompt: Sequence[int], max_tokens: int) -> tuple[Answer, list[int]]:
        """Runs a request alone; returns metrics of its first token, and all tokens."""
        on_disk = self.counter("external_prefix_cache_hits")
        started, cpu = time.perf_counter(), time.process_time()
        self.add(prompt, max_tokens)
        outputs = []
        while not outputs:
            outputs = self._engine.step()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step() or outputs
        found = outputs[0].num_cached_tokens or 0
        on_disk = int(self.counter("external_prefix_cache_hits") - on_disk)
        return Answer(seconds, cpu, found, on_disk), list(outputs[0].outputs[0].token_ids)

    def flush(self) -> None:
        """Steps until all pending pages are on disk."""
        while self._scheduler.has_requests():
            self._engine.step()

    def stop(self, name: str) -> None:
        """Aborts a request."""
        self._engine.abort_request([name])
        self.flush()

    def forget(self) -> None:
        """Clears the prefix cache in memory, but not on disk; no request may be running."""
        assert self._llm.reset_prefix_cache()

    def counter(self, name: str) -> float:
        """Returns a /metrics counter of the process's newest engine."""
        return sum(
            sample.value
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name == f"vllm:{name}_total"
        )


def _pausing(
    step: Callable[[], tuple[object, bool]], busy: Callable[[], bool]
) -> Callable[[], tuple[object, bool]]:
    """Wraps a step to wait as vLLM's server does; an idle in-process engine would spin."""

    def paused() -> tuple[object, bool]:
        outputs, computed = step()
        if not computed and busy():
            time.sleep(_POLL_S)
        return outputs, computed

    return paused
