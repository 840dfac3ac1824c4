# SPDX-License-Identifier: Apache-2.0
import gc
from itertools import pairwise

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams

from metal_kernels.layout import RaggedRows
from vllm_metal.engine.sample import DraftSpans, Sampler, rows_at_once
from vllm_metal.engine.sample.logit_chunks import logit_chunks


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(1, 12))
def test_chunks_hold_whole_spans_each_once_and_no_more_rows_than_asked(lens, most):
    lens = np.array(lens, np.int32)
    drafts = np.arange(lens.sum(), dtype=np.int32)
    draft_spans = DraftSpans(RaggedRows.of(lens), mx.array(drafts))
    found = list(logit_chunks(len(drafts), draft_spans, most))
    seen = [row for rows, _ in found for row in range(rows.start, rows.stop)]
    assert seen == drafts.tolist()
    for rows, part in found:
        assert rows.stop - rows.start <= most or len(part.lens_np) == 1
        assert part.draft_ids.tolist() == drafts[rows].tolist()
        assert part.lens_np.sum() == rows.stop - rows.start
    for (_, part), (_, after) in pairwise(found):
        assert part.lens_np.sum() + after.lens_np[0] > most  # it had no room for one more
    rows_only = list(logit_chunks(len(drafts), None, most))
    assert [rows.stop - rows.start for rows, _ in rows_only[:-1]] == [most] * (len(rows_only) - 1)


def test_a_large_vocabulary_is_sampled_a_few_rows_at_once():
    assert rows_at_once(151_936) == 55
    assert rows_at_once(2**30) == 1


def test_memory_does_not_grow_with_the_rows():
    num_rows, vocab_size, at_once = 256, 8192, 8
    params = SamplingParams(top_p=0.9, min_p=0.01, seed=1, logprobs=5)
    logits = mx.random.normal((num_rows, vocab_size), key=mx.random.key(0))
    req_indices = np.arange(num_rows, dtype=np.int32)
    outputs = []
    for most in (num_rows, at_once):
        sampler = Sampler(vocab_size, num_rows)
        sampler.rows_at_once = most
        for req_idx in req_indices.tolist():
            sampler.add_request(req_idx, params, [0], [])
        mx.eval(logits)
        gc.collect()  # what other tests left
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        out = sampler.sample(logits, req_indices, np.zeros_like(req_indices))
        mx.eval(list(out.arrays()))
        outputs.append((out, mx.get_peak_memory() - before))
    (whole, much), (divided, little) = outputs
    assert much > logits.nbytes
    assert little < logits.nbytes / 2
    for got, expected in zip(divided.arrays(), whole.arrays(), strict=True):
        np.testing.assert_allclose(np.array(got), np.array(expected), rtol=1e-6)
