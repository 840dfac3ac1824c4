# SPDX-License-Identifier: Apache-2.0
"""Matches the scheduler's grammar bitmasks to the batch's sampling rows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from vllm_metal.engine.batch.input_batch import InputBatch
from vllm_metal.engine.sample import GrammarMask

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput


def match_grammar_mask(
    batch: InputBatch, output: GrammarOutput
) -> tuple[GrammarMask | None, InputBatch]:
    """Returns the masks by sampling row (None: no grammars), and the batch; its drafts that have
    no mask become -1.
    """
    # A draft of -1 is never accepted.
    # For each request with a grammar, in the order of its own list, the scheduler sends one mask
    # for the next token and one for each row that it reserved for a draft. It advances a grammar
    # through the drafts that it knows, so rows after other drafts have no valid mask.
    sampling = {
        batch.requests[index].req_id: n for n, index in enumerate(batch.sampling_np.tolist())
    }
    reserved: dict[str, int] = {}
    if batch.drafts is not None:
        counts = batch.drafts.reserved_np.tolist()
        reserved = {state.req_id: n for state, n in zip(batch.requests, counts, strict=True)}
    starts, lens = batch.spans.starts_np, batch.spans.lens_np
    rows, mask_rows, unmasked, mask_row = [], [], [], 0
    acceptable = output.num_acceptable_drafts or [0] * len(output.structured_output_request_ids)
    for req_id, num_seen in zip(output.structured_output_request_ids, acceptable, strict=True):
        if (n := sampling.get(req_id)) is not None:
            in_span = np.arange(lens[n])
            rows.append(starts[n] + in_span)
            mask_rows.append(mask_row + in_span)
            unmasked.append(starts[n] + in_span[num_seen:])
        mask_row += 1 + reserved.get(req_id, 0)
    if not rows:
        return None, batch
    mask = GrammarMask(
        np.concatenate(rows).astype(np.int32), output.grammar_bitmask[np.concatenate(mask_rows)]
    )
    draft_spans, without_mask = batch.draft_spans, np.concatenate(unmasked)
    if draft_spans is not None and without_mask.size:
        lacks_mask = np.zeros(len(batch.sample_req_indices_np), bool)
        lacks_mask[without_mask] = True
        kept = mx.where(mx.array(lacks_mask), -1, draft_spans.draft_ids)
        batch = dataclasses.replace(
            batch, draft_spans=dataclasses.replace(draft_spans, draft_ids=kept)
        )
    return mask, batch
