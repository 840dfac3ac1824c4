# SPDX-License-Identifier: Apache-2.0
"""Makes layouts of steps over given blocks."""

import numpy as np

from vllm_metal.engine.kv_cache.layer_state import StepLayout


def layout_of(requests, **options):
    """Lays out (blocks, computed tokens, tokens of this step) per request; blocks of 16."""
    counts = np.array([rows for _, _, rows in requests])
    lens = counts + np.array([before for _, before, _ in requests])
    tables = np.zeros((len(requests), max(len(blocks) for blocks, _, _ in requests)), np.int32)
    slots = []
    for row, (blocks, before, rows) in enumerate(requests):
        tables[row, : len(blocks)] = blocks
        positions = np.arange(before, before + rows)
        slots.append(tables[row, positions // 16] * 16 + positions % 16)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    slots = np.concatenate(slots).astype(np.int32)
    return StepLayout(starts, lens.astype(np.int32), tables, slots, 16, **options)
