# SPDX-License-Identifier: Apache-2.0
"""The pool holds what was written and is never copied, two steps in flight included."""

import mlx.core as mx
import numpy as np

from vllm_metal.kv_cache.pool import Region


def test_flush_puts_rows_into_their_slots():
    rng = np.random.default_rng(0)
    region = Region(5, 16, 2, 4, mx.float32)
    expected_keys = np.zeros((80, 2, 4), np.float32)
    expected_values = expected_keys.copy()
    for _ in range(3):  # steps
        for _ in range(2):  # layers of two groups, whose blocks differ
            slots = rng.choice(80, 6, replace=False).astype(np.int32)
            keys, values = rng.normal(size=(2, 6, 2, 4)).astype(np.float32)
            region.write(mx.array(slots), mx.array(keys), mx.array(values))
            expected_keys[slots], expected_values[slots] = keys, values
            region.flush()
    for found, expected in ((region.keys, expected_keys), (region.values, expected_values)):
        assert found.shape == (2, 5, 16, 4)  # heads, blocks, slots of a block, head size
        by_slot = np.array(found).reshape(2, 80, 4).swapaxes(0, 1)
        np.testing.assert_array_equal(by_slot, expected)


def test_two_steps_in_flight_never_copy_the_pool():
    regions = [Region(2048, 16, 4, 64, mx.float32) for _ in range(4)]
    mx.eval([array for region in regions for array in (region.keys, region.values)])
    one_pool = regions[0].keys.nbytes
    slots, table = mx.arange(8, dtype=mx.int32) * 100, mx.arange(16, dtype=mx.int32)

    def step(x):
        """Four regions, each written by two layers and read by both, as groups share them."""
        for region in regions:
            region.flush()
        for layer in range(2):
            for region in regions:
                fresh = mx.broadcast_to(x[:, None, None], (8, 4, 64))
                region.write(slots + layer, fresh, fresh)
                x = x + region.keys[:, table].sum() * 1e-9 + region.values[:, table].sum() * 1e-9
        return x

    mx.reset_peak_memory()
    before = mx.get_active_memory()
    x, in_flight = mx.ones(8), None
    for _ in range(8):
        x = step(x)  # built while the step before runs
        if in_flight is not None:
            mx.eval(in_flight)
        mx.async_eval(x)
        in_flight = x
    mx.eval(x)
    assert mx.get_peak_memory() - before < one_pool  # the reads are an eighth of that
