# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import ClassVar

import mlx.core as mx
import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import (
    STR_SPEC_DEC_REJECTS_LOGITSPROCS,
    AdapterLogitsProcessor,
    LogitsProcessor,
    MoveDirectionality,
)

from metal_kernels.layout import RaggedRows
from vllm_metal.engine.sample import CustomProcessors, DraftSpans, Sampler

V = 32


class ForceToken(LogitsProcessor):
    """Allows only the token of extra_args["force"]. Checks every batch update."""

    instances: ClassVar[list["ForceToken"]] = []

    def __init__(self, vllm_config, device, is_pin_memory):
        self.forced: dict[int, int | None] = {}
        self.outputs: dict[int, list[int]] = {}
        self.updates = 0
        self.instances.append(self)

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        if batch_update is None:
            return
        self.updates += 1
        for index in batch_update.removed:
            del self.forced[index], self.outputs[index]
        for index, params, prompt, output in batch_update.added:
            assert prompt == [1, 2]
            self.forced[index] = (params.extra_args or {}).get("force")
            self.outputs[index] = output
        for source, target, how in batch_update.moved:
            assert how == MoveDirectionality.UNIDIRECTIONAL
            self.forced[target] = self.forced.pop(source)
            self.outputs[target] = self.outputs.pop(source)
        # The remaining requests must be a batch without holes.
        assert sorted(self.forced) == list(range(batch_update.batch_size))

    def apply(self, logits):
        assert logits.shape == (len(self.forced), V)
        for index, token in self.forced.items():
            if token is not None:
                kept = logits[index, token].clone()
                logits[index] = -torch.inf
                logits[index, token] = kept
        return logits


class OnlyEven(LogitsProcessor):
    """Removes odd tokens from random rows, leaving the result in a new tensor."""

    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        odd = torch.arange(logits.shape[1]) % 2 == 1
        return logits.masked_fill(odd, -torch.inf)


class NoRepeat(AdapterLogitsProcessor):
    """vLLM's per-request form: removes the request's previous token."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        def process(output_ids, logits):
            if output_ids:
                logits[output_ids[-1]] = -torch.inf
            return logits

        return process


def sampler(*classes: type[LogitsProcessor], max_num_reqs: int = 6) -> Sampler:
    config = SimpleNamespace(
        model_config=SimpleNamespace(logits_processors=list(classes)), speculative_config=None
    )
    return Sampler(V, max_num_reqs, custom=CustomProcessors(config))


def test_processor_follows_requests_through_adds_removes_and_reorderings():
    ForceToken.instances.clear()
    under_test = sampler(ForceToken)
    processor = ForceToken.instances[-1]
    rng = np.random.default_rng(0)
    forced: dict[int, int | None] = {}
    outputs: dict[int, list[int]] = {}
    for _ in range(120):
        for req_idx in rng.permutation(6).tolist():
            if req_idx in forced and rng.random() < 0.25:
                under_test.remove_request(req_idx)
                del forced[req_idx], outputs[req_idx]
            if req_idx not in forced and rng.random() < 0.4:
                token = int(rng.integers(V)) if rng.random() < 0.8 else None
                extra = None if token is None else {"force": token}
                forced[req_idx], outputs[req_idx] = token, []
                params = SamplingParams(temperature=0, extra_args=extra)
                under_test.add_request(req_idx, params, [1, 2], outputs[req_idx])
        present = [s for s in rng.permutation(list(forced)).tolist() if rng.random() < 0.8]
        if not present:
            continue
        req_indices = np.array(present, dtype=np.int32)
        counts = np.array([len(outputs[s]) for s in present], dtype=np.int32)
        logits = rng.normal(size=(len(req_indices), V)).astype(np.float32)
        tokens = under_test.sample(mx.array(logits), req_indices, counts).token_ids.tolist()
        for row, req_idx in enumerate(present):
            token = forced[req_idx]
            assert tokens[row] == (logits[row].argmax() if token is None else token)
            outputs[req_idx].append(tokens[row])
        assert {id(o) for o in processor.outputs.values()} == {id(o) for o in outputs.values()}
    assert processor.updates > 50


def test_argmax_invariant_processors_apply_to_draws():
    under_test = sampler(OnlyEven)
    under_test.add_request(0, SamplingParams(), [1], [])
    for step in range(30):
        out = under_test.sample(mx.zeros((1, V)), np.zeros(1, np.int32), np.zeros(1, np.int32))
        assert out.token_ids.item() % 2 == 0, step


def test_per_request_processors_see_the_tokens_the_owner_appends():
    under_test = sampler(NoRepeat)
    assert under_test.needs_host_tokens
    output: list[int] = []
    under_test.add_request(3, SamplingParams(temperature=0), [1], output)
    req_indices, logits = np.array([3], dtype=np.int32), mx.arange(V, dtype=mx.float32)[None]
    for step in range(4):
        out = under_test.sample(logits, req_indices, np.array([step], dtype=np.int32))
        output.append(out.token_ids.item())
    assert output == [V - 1, V - 2, V - 1, V - 2]


def test_output_tokens_left_behind_are_an_error():
    under_test = sampler(NoRepeat)
    under_test.add_request(0, SamplingParams(), [1], [])
    with pytest.raises(RuntimeError, match="append the previous step's tokens"):
        under_test.sample(mx.zeros((1, V)), np.zeros(1, np.int32), np.ones(1, np.int32))


def test_drafts_are_refused():
    under_test = sampler(OnlyEven, ForceToken)
    under_test.add_request(0, SamplingParams(temperature=0), [1, 2], [])
    zeros, start = np.zeros(2, dtype=np.int32), np.zeros(1, dtype=np.int32)
    draft_spans = DraftSpans(RaggedRows.of(start + 2), mx.array([3, -1]))
    with pytest.raises(ValueError, match=r"\(OnlyEven, ForceToken\) cannot be combined"):
        under_test.sample(
            mx.zeros((2, V)), zeros, np.arange(2, dtype=np.int32), draft_spans=draft_spans
        )
    single = DraftSpans(RaggedRows.of(start + 1), mx.array([-1]))
    out = under_test.sample(mx.zeros((1, V)), start, start, draft_spans=single)
    assert out.num_accepted.tolist() == [0]


def test_no_processors_means_no_waiting():
    assert not sampler().needs_host_tokens
    assert not Sampler(V, 1).needs_host_tokens


def test_speculative_decoding_is_refused_as_in_vllm():
    config = SimpleNamespace(
        model_config=SimpleNamespace(logits_processors=[OnlyEven]), speculative_config=object()
    )
    with pytest.raises(ValueError, match=STR_SPEC_DEC_REJECTS_LOGITSPROCS):
        CustomProcessors(config)
