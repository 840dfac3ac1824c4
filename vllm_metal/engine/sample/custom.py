# SPDX-License-Identifier: Apache-2.0
"""Runs user-written logits processors (vLLM's v1 interface) in torch on the host.

Processors read each request's output tokens, so the runner must append those of the previous step
before it calls `Sampler.sample`; see `Sampler.needs_host_tokens`.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import (
    STR_SPEC_DEC_REJECTS_LOGITSPROCS,
    BatchUpdateBuilder,
    LogitsProcessor,
    LogitsProcessors,
    MoveDirectionality,
    cached_load_custom_logitsprocs,
)

from vllm_metal.engine.sample.stage import SamplingStage, Step


class CompactBatch:
    """Numbers requests 0..B-1 without holes, as processors expect.

    Reports all changes between two steps together. A new request takes the lowest free index, else
    the next at the end; then the last requests move into remaining holes.
    """

    def __init__(self) -> None:
        self._req_idx_at: list[int | None] = []  # by batch index; None: a hole
        self._index_of: dict[int, int] = {}
        self._waiting: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
        self._builder = BatchUpdateBuilder()

    def __len__(self) -> int:
        return len(self._req_idx_at)

    def add_request(
        self, req_idx: int, params: SamplingParams, prompt: Sequence[int], output: list[int]
    ) -> None:
        self._waiting[req_idx] = (params, list(prompt), output)

    def remove_request(self, req_idx: int) -> None:
        if self._waiting.pop(req_idx, None) is not None:
            return
        index = self._index_of.pop(req_idx, None)
        if index is not None:
            self._req_idx_at[index] = None
            self._builder.removed_append(index)

    def notify(self, processors: LogitsProcessors) -> None:
        """Numbers new requests and reports all changes to the processors; call before each step."""
        for req_idx, (params, prompt, output) in self._waiting.items():
            index = self._builder.pop_removed()
            if index is None:
                index = len(self._req_idx_at)
                self._req_idx_at.append(None)
            self._place(req_idx, index)
            self._builder.added.append((index, params, prompt, output))
        self._waiting.clear()
        self._fill_holes()
        update = self._builder.get_and_reset(len(self._req_idx_at))
        for processor in processors.all:
            processor.update_state(update)

    def indices(self, req_indices: np.ndarray) -> np.ndarray:
        """Returns int64 batch indices of the req_indices."""
        return np.array(
            [self._index_of[req_idx] for req_idx in req_indices.tolist()], dtype=np.int64
        )

    def _fill_holes(self) -> None:
        while True:
            while self._req_idx_at and self._req_idx_at[-1] is None:
                self._req_idx_at.pop()
            hole = self._builder.peek_removed()
            if hole is None or hole >= len(self._req_idx_at):
                return
            last = len(self._req_idx_at) - 1
            req_idx = self._req_idx_at[last]
            assert req_idx is not None
            self._builder.pop_removed()
            self._builder.moved.append((last, hole, MoveDirectionality.UNIDIRECTIONAL))
            self._req_idx_at[last] = None
            self._place(req_idx, hole)

    def _place(self, req_idx: int, index: int) -> None:
        self._req_idx_at[index] = req_idx
        self._index_of[req_idx] = index


class CustomProcessors(SamplingStage):
    """Runs processors of --logits-processors and of `vllm.logits_processors` plugins.

    It does not run vLLM's builtin ones (min_p, logit_bias, min_tokens): our stages serve those
    parameters. Every request is added to all processors here, and this stage runs in every step, so
    that all processors see every change to the batch. It applies only those that may change the
    most likely token; `KeepingProcessors` applies the others.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        named = vllm_config.model_config.logits_processors
        classes: list[type[LogitsProcessor]] = cached_load_custom_logitsprocs(
            tuple(named) if named else None
        )
        if classes and vllm_config.speculative_config is not None:
            raise ValueError(STR_SPEC_DEC_REJECTS_LOGITSPROCS)
        device = torch.device("cpu")
        self._processors = LogitsProcessors(cls(vllm_config, device, False) for cls in classes)
        self._batch = CompactBatch()
        self._outputs: dict[int, list[int]] = {}

    def __bool__(self) -> bool:
        return any(True for _ in self._processors.all)

    @property
    def keeping(self) -> list[LogitsProcessor]:
        return self._processors.argmax_invariant

    def add_request(
        self, req_idx: int, params: SamplingParams, prompt: Sequence[int], output: list[int]
    ) -> bool:
        """Keeps `output` by reference: its owner appends to it, and processors read it."""
        self._outputs[req_idx] = output
        self._batch.add_request(req_idx, params, prompt, output)
        return True

    def remove_request(self, req_idx: int) -> None:
        self._outputs.pop(req_idx, None)
        self._batch.remove_request(req_idx)

    def apply(self, logits: mx.array, step: Step) -> mx.array:
        """Updates the processors' batch, then applies those that may change the most likely token.

        Raises RuntimeError if a request's output list lacks tokens, and ValueError for drafts,
        which processors cannot see.
        """
        if step.draft_spans is not None and (step.draft_spans.lens_np > 1).any():
            names = ", ".join(type(processor).__name__ for processor in self._processors.all)
            raise ValueError(
                f"custom logits processors ({names}) cannot be combined with speculative decoding; "
                "remove --logits-processors (or the plugin that registers them) or "
                "--speculative-config"
            )
        for req_idx, expected in zip(
            step.req_indices.tolist(), step.num_output_tokens.tolist(), strict=True
        ):
            if (known := len(self._outputs[req_idx])) != expected:
                raise RuntimeError(
                    f"request {req_idx}: custom logits processors would see {known} output tokens "
                    f"of {expected}; append the previous step's tokens before sampling"
                )
        self._batch.notify(self._processors)
        return self.run(self._processors.non_argmax_invariant, logits, step)

    def run(self, processors: list[LogitsProcessor], logits: mx.array, step: Step) -> mx.array:
        """Maps float32 [N, V] -> float32 [N, V] through a float32 torch tensor [B, V]."""
        if not processors:
            return logits
        indices = torch.from_numpy(self._batch.indices(step.req_indices))
        # Processors expect a row for every request; rows that do not sample now stay zero, and
        # their results are discarded.
        batch = torch.zeros((len(self._batch), logits.shape[1]), dtype=torch.float32)
        # Waits for the device; no other part of the sampler does.
        batch[indices] = torch.from_numpy(np.array(logits))
        for processor in processors:
            batch = processor.apply(batch)
        return mx.array(batch[indices].to(torch.float32).numpy())


class KeepingProcessors(SamplingStage):
    """Applies the custom processors that keep the most likely token."""

    keeps_argmax = True

    def __init__(self, custom: CustomProcessors) -> None:
        self._custom = custom

    def add_request(
        self, req_idx: int, params: SamplingParams, prompt: Sequence[int], output: list[int]
    ) -> bool:
        return bool(self._custom.keeping)

    def remove_request(self, req_idx: int) -> None:
        """No-op: `CustomProcessors.remove_request` already notifies all processors."""

    def apply(self, logits: mx.array, step: Step) -> mx.array:
        return self._custom.run(self._custom.keeping, logits, step)
