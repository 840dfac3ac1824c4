# SPDX-License-Identifier: Apache-2.0
"""Steps of a text model with hand-made image features, like those vLLM's scheduler sends."""

import numpy as np
import torch
from engine.batch.test_requests import word
from engine.models.test_executor import executor
from vllm import SamplingParams
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData

from vllm_metal.engine.batch.outputs import StepOutput
from vllm_metal.engine.batch.requests import BlockTables, Requests
from vllm_metal.engine.worker.model_runner import ModelRunner
from vllm_metal.engine.worker.results import Step
from vllm_metal.engine.worker.sampling_head import OutputHead

BLOCK, MOST, BLOCKS_EACH = 16, 4, 8


def feature(data, offset, length, identifier, is_embed=None, modality="image"):
    """Makes a feature like vLLM's processors."""
    field = MultiModalBatchedField(keep_on_cpu=True)
    item = MultiModalKwargsItem(
        {name: MultiModalFieldElem(torch.as_tensor(a), field) for name, a in data.items()}
    )
    place = PlaceholderRange(offset, length, None if is_embed is None else torch.tensor(is_embed))
    return MultiModalFeatureSpec(item, modality, identifier, place)


class AllLogits(OutputHead):
    """Returns the logits of all rows."""

    at_once = True

    def __init__(self, model, requests):
        self.model, self.requests = model, requests

    def enter(self, state):
        pass

    def leave(self, req_idx):
        pass

    def begin(self, batch, hidden_states):
        self.begun = batch, self.model.compute_logits(hidden_states)

    def finish(self, grammar_output):
        batch, self.logits = self.begun
        return StepOutput(batch, None, {}, self.requests), [self.logits]


class ByHand:
    """A runner over a text model; each request has blocks of its own."""

    def __init__(self, model, model_type, column_of, backend=None):
        kinds = {} if backend is None else {"backend": backend}
        self.model = executor(model, model_type, 1 + MOST * BLOCKS_EACH, **kinds)
        self.column = column_of(self.model.parts)
        tables = BlockTables(1, MOST, BLOCKS_EACH)
        self.requests = Requests(MOST, BLOCK * BLOCKS_EACH, tables)
        self.end = AllLogits(self.model, self.requests)
        self.runner = ModelRunner(self.model, self.requests, self.end, MOST, columns=[self.column])
        self.known, self.computed, self.blocks = {}, {}, {}

    def new(self, req_id, tokens, features=(), computed=0, blocks_of=None):
        """Adds a request; the first `computed` tokens are found in another one's blocks."""
        place = len(self.blocks)
        own = list(range(1 + place * BLOCKS_EACH, 1 + (place + 1) * BLOCKS_EACH))
        if blocks_of is not None:
            shared = computed // BLOCK
            own[:shared] = self.blocks[blocks_of][:shared]
        self.blocks[req_id], self.computed[req_id] = own, computed
        return NewRequestData(
            req_id, list(tokens), list(features), SamplingParams(), None, (own,), computed, None
        )

    def step(self, scheduled, new=(), resumed=(), **told):
        """Returns [n, V] logits of each request's rows."""
        fresh = {each.req_id for each in new}
        going = [req_id for req_id in scheduled if req_id not in fresh]
        cached = CachedRequestData(
            req_ids=going,
            resumed_req_ids=set(resumed),
            new_token_ids=[],
            all_token_ids={req_id: self.tokens(req_id) for req_id in resumed},
            new_block_ids=[(self.blocks[each],) if each in resumed else None for each in going],
            num_computed_tokens=[self.computed[req_id] for req_id in going],
            num_output_tokens=[0] * len(going),
        )
        at_hand = Step(
            word(
                scheduled_new_reqs=list(new),
                scheduled_cached_reqs=cached,
                num_scheduled_tokens=dict(scheduled),
                **told,
            ),
            pool=0,
        )
        for each in new:
            self.known[each.req_id] = each.prompt_token_ids
        self.runner.execute(at_hand)
        self.runner.finish(at_hand, None)
        logits = np.array(self.end.logits)
        ends = np.cumsum(list(scheduled.values()))
        for req_id, count in scheduled.items():
            self.computed[req_id] += count
        return dict(zip(scheduled, np.split(logits, ends[:-1]), strict=True))

    def tokens(self, req_id):
        return list(self.known[req_id])

    def say(self, req_id, token):
        """Appends this token to the request, as if it had been sampled."""
        state = self.requests[req_id]
        self.requests.note_sampled(np.array([state.req_idx], np.int32))
        self.requests.append_tokens(state, [token])
        self.known[req_id] = [*self.known[req_id], token]
