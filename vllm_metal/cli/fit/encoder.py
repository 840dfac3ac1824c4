# SPDX-License-Identifier: Apache-2.0
"""Estimates an encoder's memory: weights and a step, without a KV cache."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from vllm.config.cache import CacheConfig

from vllm_metal.cli.fit import engine
from vllm_metal.cli.fit.graph import record_with_weights, recordable
from vllm_metal.cli.fit.machine import Machine
from vllm_metal.cli.fit.peak import peak
from vllm_metal.cli.fit.report import serve_command
from vllm_metal.engine.memory import budget
from vllm_metal.engine.memory.budget import Budget, Measured, Settings
from vllm_metal.engine.models.loader import MLX_DTYPES, weight_bytes
from vllm_metal.engine.pooling.encoders.executor import EncoderExecutor
from vllm_metal.engine.pooling.encoders.loading import lazy_encoder
from vllm_metal.engine.pooling.encoders.networks import Encoder
from vllm_metal.engine.pooling.encoders.profile import largest_lengths, rows_of
from vllm_metal.engine.pooling.encoders.served import Architecture
from vllm_metal.platform import metal_platform

_GIB = 2**30
#: Where sentence-transformers stores the maximum length of a text.
_LENGTH_FILE, _LENGTH = "sentence_bert_config.json", "max_seq_length"


@dataclass(frozen=True)
class EncoderFitResult:
    """The estimate for an encoder, and whether it fits."""

    model: str
    architecture: str
    dtype: str
    machine: str
    weights: int  # bytes
    longest: int  # tokens per text
    rows: int  # tokens per step
    budget: Budget
    command: str  # command to serve it with these settings

    @property
    def fits(self) -> bool:
        return self.budget.left >= 0

    def text(self) -> str:
        """Formats the answer for people."""
        name = f"{self.model} ({self.architecture}, {self.dtype}) on {self.machine}"
        verdict = "Fits" if self.fits else "Does not fit"
        lines = [
            name,
            "",
            "Memory; an encoder keeps no KV cache, and the peak of a step is an estimate:",
            self.budget.table(),
            "",
            f"{verdict}: texts of up to {self.longest:,} tokens, {self.rows:,} tokens a step.",
        ]
        if self.fits:
            return "\n".join([*lines, "", "To serve it with these settings:", f"  {self.command}"])
        less = "Lower --context or --max-num-batched-tokens, or choose a smaller model."
        return "\n".join([*lines, less])

    def content(self) -> dict[str, Any]:
        """Returns the answer as JSON values; sizes in bytes."""
        return {
            "model": self.model,
            "architecture": self.architecture,
            "dtype": self.dtype,
            "machine": self.machine,
            "weights": self.weights,
            "context": self.longest,
            "step": self.rows,
            "fits": self.fits,
            "memory": self.budget.as_json(),
            "commands": [self.command] if self.fits else [],
        }


def find(args: Namespace, path: Path, served: Architecture, machine: Machine) -> EncoderFitResult:
    """Returns the answer for an encoder, built from the folder `path`.

    Raises ModelLoadError if it cannot be built, ValueError if the context exceeds the longest text.
    """
    content = json.loads((path / "config.json").read_text())
    dtype = engine.dtype_of(content, machine.kind, args.dtype or "auto", encoder=True)
    encoder, _ = lazy_encoder(path, served, MLX_DTYPES[dtype])
    most = _longest(path, content, served)
    if args.context is not None and args.context > most:
        raise ValueError(
            f"--context {args.context} is longer than the model's maximum of {most} tokens"
        )
    longest = args.context or most
    default = metal_platform.MAX_NUM_BATCHED_TOKENS[machine.kind]
    rows = args.max_num_batched_tokens or max(default, longest)
    if rows < longest:
        raise ValueError(
            f"a text of {longest} tokens needs --max-num-batched-tokens {longest} or more"
        )
    texts = args.max_num_seqs or metal_platform.MAX_NUM_SEQS
    weights = weight_bytes(encoder.model)
    measured = Measured(
        source=machine.source,
        total=machine.total,
        in_use=machine.in_use,
        weights=weights,
        cache=machine.cache,
        forward=_step_peak(encoder, largest_lengths(rows, longest, texts), machine),
    )
    settings = Settings(_utilization(args), rows, texts, longest)
    found = replace(budget.budget_of(measured, settings), result="left: there is no KV pool")
    return EncoderFitResult(
        model=args.model,
        architecture=str(content["architectures"][0]),
        dtype=str(dtype).removeprefix("torch."),
        machine=machine.name,
        weights=weights,
        longest=longest,
        rows=rows,
        budget=found,
        command=_command(args, longest),
    )


def _utilization(args: Namespace) -> float:
    default = CacheConfig().gpu_memory_utilization
    return default if args.gpu_memory_utilization is None else float(args.gpu_memory_utilization)


def _longest(path: Path, content: Mapping[str, Any], served: Architecture) -> int:
    """Returns the longest text's number of tokens, by vLLM's rules and the position table."""
    stated = engine.longest_text(dict(content))
    if (path / _LENGTH_FILE).is_file():
        stated = json.loads((path / _LENGTH_FILE).read_text()).get(_LENGTH) or stated
    positions = served.family.positions(content) if served.family.positions else None
    known = [length for length in (stated, positions) if length is not None]
    if not known:
        raise ValueError(
            "config.json does not state the maximum length of a text: add max_position_embeddings"
        )
    return int(min(known))


def _step_peak(encoder: Encoder, lengths: list[int], machine: Machine) -> int:
    """Returns the peak bytes of a step with texts of these lengths, without running it."""

    def build() -> list[mx.array]:
        return [EncoderExecutor(encoder, 1).forward_hidden(rows_of(lengths), None)]

    with recordable(metal=machine.kind == "metal"):
        graph, weights = record_with_weights(encoder.model, build)
    return peak(graph, graph.outputs, (), weights)


def _command(args: Namespace, longest: int) -> str:
    options = {
        "max-model-len": longest,
        "max-num-seqs": args.max_num_seqs,
        "max-num-batched-tokens": args.max_num_batched_tokens,
        "gpu-memory-utilization": args.gpu_memory_utilization,
        "dtype": args.dtype,
    }
    return serve_command(args.model, options)
