# SPDX-License-Identifier: Apache-2.0
"""Estimates each rank of a model, and judges whether the requests fit on all of them."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_metal.platform import metal_platform  # first: it loads a BLAS before anything imports MLX

# isort: split
from metal_kernels.layout import BLOCK_SIZES
from vllm_metal.cli.fit import engine, report
from vllm_metal.cli.fit.drafter import Drafter, MTPDrafter
from vllm_metal.cli.fit.estimate import Estimate, Model, estimate
from vllm_metal.cli.fit.layout import Layout
from vllm_metal.cli.fit.machine import Machine
from vllm_metal.cli.fit.report import FitResult, Part
from vllm_metal.cli.fit.source import folder
from vllm_metal.engine.kv_cache import formats
from vllm_metal.engine.memory import advice, budget
from vllm_metal.engine.weights.disk_tables import TableRule

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

#: The quantized cache that is compared with the requested one; int8 takes the same bytes.
_QUANTIZED = "fp8"
_NAMED_CHANGES = 4


@dataclass(frozen=True)
class FitRequest:
    """The model, the options to serve it with, and the machine."""

    args: Namespace  # arguments of `vllm_metal.cli.main`
    path: Path  # a folder that the model can be built from
    content: Mapping[str, Any]  # its config.json
    machine: Machine  # or a rank's share of one
    layout: Layout
    may_draft: bool = True  # whether the model's MTP layer drafts without any flag

    @property
    def dtype(self) -> torch.dtype:
        return engine.dtype_of(dict(self.content), self.machine.kind, self.args.dtype or "auto")

    @property
    def runner(self) -> str:
        return self.args.runner or "generate"

    @property
    def rows(self) -> int:
        """Maximum tokens per step."""
        most = metal_platform.MAX_NUM_BATCHED_TOKENS[self.machine.kind]
        return int(self.args.max_num_batched_tokens or most)

    @property
    def tables(self) -> TableRule | None:
        """Decides which embedding tables stay on disk; None: ranks load all of their weights."""
        place = self.args.embedding_tables or "auto"
        return TableRule(place, self.machine.total) if self.layout.num_ranks == 1 else None

    @property
    def requests_at_once(self) -> int:
        """Maximum requests per step."""
        asked = self.args.max_num_seqs or self.args.requests
        return asked or min(metal_platform.MAX_NUM_SEQS, self.rows)

    @cached_property
    def drafter(self) -> Drafter | MTPDrafter | None:
        """The drafter of --draft-model, or else the default one; None: nothing drafts.

        Raises:
            ValueError: the model is no block drafter, or conflicts with the other options.
            ModelLoadError: the drafter cannot be built.
        """
        args = self.args
        if args.draft_model is None:
            if args.draft_quantization is not None:
                raise ValueError("--draft-quantization needs --draft-model")
            return self._default_drafter()
        if self.layout.num_ranks > 1 or self.runner == "pooling":
            raise ValueError(
                "--draft-model is not supported with several ranks or --runner pooling: leave it "
                "out"
            )
        count = args.num_speculative_tokens
        with folder(args.draft_model) as path:
            return Drafter.read(path, self.dtype, args.draft_quantization, count)

    def _default_drafter(self) -> MTPDrafter | None:
        # As `platform.default_drafts` decides.
        args = self.args
        others = args.num_speculative_tokens or args.max_loras or args.model is None
        if not self.may_draft or others or self.layout.num_ranks > 1 or self.runner == "pooling":
            return None
        return MTPDrafter.find(args.model)

    @property
    def num_drafts(self) -> int:
        """Largest number of drafts of a request in a step."""
        if self.drafter is not None:
            return self.drafter.num_drafts
        return self.args.num_speculative_tokens or 0

    @property
    def context(self) -> int:
        """Tokens of the longest request.

        Raises ValueError if no length is known, or it exceeds the model's maximum.
        """
        most, asked = engine.longest_text(dict(self.content)), self.args.context
        if (length := asked or most) is None:
            raise ValueError(
                "config.json does not state the maximum length of a text: give --context, "
                "such as 32k"
            )
        if most is not None and length > most:
            raise ValueError(
                f"--context {asked} is longer than the model's maximum of {most} tokens"
            )
        return int(length)

    def config(self, cache_dtype: str) -> VllmConfig:
        """Returns vLLM's configuration with this --kv-cache-dtype."""
        args, layout = self.args, self.layout
        return engine.config(
            model_type=self.content["model_type"],
            dtype=self.dtype,
            cache_dtype=cache_dtype,
            max_model_len=self.context,
            fitted=args.context is None,
            max_num_seqs=self.requests_at_once,
            max_num_batched_tokens=self.rows,
            gpu_memory_utilization=args.gpu_memory_utilization,
            block_size=args.block_size or BLOCK_SIZES[0],
            block_size_asked=args.block_size is not None,
            num_drafts=self.num_drafts,
            runner_type=self.runner,
            stages=layout.stages if layout.num_ranks > 1 else None,
            adapters=engine.adapters(args.max_loras, args.max_cpu_loras, args.max_lora_rank),
        )


def judge(asked: FitRequest) -> FitResult:
    """Estimates each rank, and judges whether the requests fit; without default drafts if need be.

    Raises:
        ValueError: the engine would reject the model or the options.
        NotImplementedError: the engine does not serve the model.
        ModelLoadError: the model cannot be built.
    """
    found = _judge(asked)
    if not found.fits and isinstance(asked.drafter, MTPDrafter):
        return _judge(replace(asked, may_draft=False))  # as an engine does
    return found


def _judge(asked: FitRequest) -> FitResult:
    args = asked.args
    _check(asked)
    with asked.layout.ring() as ring:
        parts = [_part(asked, stage, ring) for stage in range(asked.layout.stages)]
        wanted = args.requests or 1
        length = min(_length(part.estimates[args.kv_cache_dtype], wanted) for part in parts)
    parts = [part.of_length(length) for part in parts]
    fits = {
        name: all(_fits(part.estimates[name], wanted) for part in parts)
        for name in parts[0].estimates
    }
    least = report.narrowest(parts, args.kv_cache_dtype).estimates[args.kv_cache_dtype]
    return FitResult(
        model=args.model,
        model_type=asked.content["model_type"],
        dtype=str(asked.dtype).removeprefix("torch."),
        machine=asked.machine,
        layout=asked.layout,
        parts=tuple(parts),
        cache_dtype=args.kv_cache_dtype,
        num_requests=wanted,
        fits=fits[args.kv_cache_dtype],
        changes=_changes(least, wanted),
        commands=tuple(_command(asked, length, name) for name, fit in fits.items() if fit),
    )


def _check(asked: FitRequest) -> None:
    args = asked.args
    if not formats.offered(args.kv_cache_dtype, asked.dtype):
        raise ValueError(
            f"--kv-cache-dtype {args.kv_cache_dtype} is not supported: choose one of "
            f"{', '.join(formats.OFFERED)}"
        )
    if args.block_size not in (None, *BLOCK_SIZES):
        raise ValueError(
            f"--block-size {args.block_size} is not supported: choose one of {BLOCK_SIZES}"
        )
    if (requests := asked.requests_at_once) > asked.rows:
        raise ValueError(
            f"{requests} requests at once need --max-num-batched-tokens {requests} or more"
        )
    if asked.runner == "pooling" and args.num_speculative_tokens:
        raise ValueError(
            "--num-speculative-tokens is not supported with --runner pooling: pooling "
            "models sample no tokens"
        )
    asked.layout.check(asked.content["model_type"], args.num_speculative_tokens or 0)


def _part(asked: FitRequest, stage: int, ring: Any) -> Part:
    layout = asked.layout
    model = Model.read(
        asked.path,
        asked.content["model_type"],
        asked.dtype,
        asked.runner == "pooling",
        bool(asked.args.language_model_only),
        ring,
        layout.stage_of(stage),
        asked.tables,
    )
    if model.images is not None and layout.num_ranks > 1:
        raise ValueError(
            "images are not supported with several ranks: add --language-model-only to "
            "serve text only"
        )
    if (drafter := asked.drafter) is not None:
        model = drafter.add_to(model)
    estimates = {}
    for cache_dtype in dict.fromkeys((asked.args.kv_cache_dtype, _QUANTIZED)):
        estimates[cache_dtype] = estimate(model, asked.config(cache_dtype), asked.machine)
        if estimates[cache_dtype].quantized is None:
            break  # the requested cache is quantized already
    return Part(layout.ranks_of(stage), model.stage, estimates)


def _length(found: Estimate, requests: int) -> int:
    if not found.settings.fitted:  # the length was requested
        return found.settings.max_model_len
    longest = budget.longest(found.measured, found.settings, found.request(requests))
    return max(longest, found.settings.least_context)


def _fits(found: Estimate, wanted: int) -> bool:
    return budget.fits(found.measured, found.settings, found.request(wanted))


def _changes(found: Estimate, wanted: int) -> tuple[str, ...]:
    if _fits(found, wanted):
        return ()
    request = found.request(wanted)
    fewer = [f"--requests {found.requests} or less"] if found.requests else []
    changes = islice(advice.changes(found.measured, found.settings, request), _NAMED_CHANGES)
    return (*fewer, *(change.advice for change in changes))


def _command(asked: FitRequest, length: int, cache_dtype: str) -> str:
    args, machines, drafts = asked.args, asked.layout.machines, dict[str, Any]()
    if args.num_speculative_tokens:
        drafts = {"method": "ngram", "num_speculative_tokens": args.num_speculative_tokens}
    if isinstance(drafter := asked.drafter, Drafter):
        drafts = {"method": drafter.method, "model": args.draft_model}
        drafts["num_speculative_tokens"] = drafter.num_drafts
    given = {
        "draft_quantization": args.draft_quantization,
        "embedding_tables": args.embedding_tables,
    }
    additional = {key: value for key, value in given.items() if value is not None}
    options = {
        "runner": args.runner,
        "data-parallel-size": args.data_parallel_size_local,
        "max-model-len": length,
        "max-num-seqs": asked.requests_at_once,
        "max-num-batched-tokens": args.max_num_batched_tokens,
        "kv-cache-dtype": None if cache_dtype == "auto" else cache_dtype,
        "gpu-memory-utilization": args.gpu_memory_utilization,
        "block-size": args.block_size,
        "dtype": args.dtype,
        "pipeline-parallel-size": args.pipeline_parallel_size,
        "tensor-parallel-size": args.tensor_parallel_size,
        "speculative-config": drafts and json.dumps(drafts),
        "additional-config": additional and json.dumps(additional),
    }
    if machines > 1:
        options |= {"nnodes": machines, "node-rank": "0", "master-addr": report.ADDRESS}
    text = ["--language-model-only"] if args.language_model_only else []
    return report.serve_command(args.model, options, text)
