# SPDX-License-Identifier: Apache-2.0
"""Layers packed into one storage compute the same as in separate ones."""

import mlx.core as mx
import numpy as np
import pytest
from engine.kv_cache.pools import DTYPES, KINDS, bits, built, make
from metal_interpreter import metal_kernel

from metal_kernels import kernel
from vllm_metal.engine.kv_cache.layer_cache import KVShape
from vllm_metal.engine.kv_cache.packed import heads_of

MORE = pytest.mark.more


@pytest.mark.parametrize("kind", ["scatter", "kernels", pytest.param("limited", marks=MORE)])
@pytest.mark.parametrize(
    "dtype", [mx.float16, mx.int8, *(pytest.param(d, marks=MORE) for d in DTYPES[:1])], ids=str
)
def test_layers_in_one_storage_equal_layers_alone(kind, dtype):
    backend = KINDS[kind]
    with kernel.using(metal_kernel):
        whole = backend.allocate(12, 16, KVShape(6, 64, 64), dtype)
        packed = [heads_of(whole, first, 2) for first in (0, 2, 4)]
        alone = [make(backend, dtype) for _ in packed]
        memory = [
            np.asarray(array.view(mx.uint8)).__array_interface__["data"] for array in whole.arrays
        ]
        # Two steps of a request, in each layer by other numbers, and a block of one is copied.
        for before, rows in ((0, 21), (21, 3), (24, 1)):
            for number, (one, other) in enumerate(zip(packed, alone, strict=True)):
                found, wanted = (
                    built(each, [3, 7], before, rows, seed=number) for each in (one, other)
                )
                np.testing.assert_array_equal(np.array(found), np.array(wanted))
        for each in (*packed, *alone):
            each.wait_for_device()
        for storage in (whole, *alone):
            storage.copy_blocks(np.array([3], np.int32), np.array([5], np.int32))
            storage.wait_for_device()
    for number, other in enumerate(alone):
        heads = slice(2 * number, 2 * number + 2)
        for held, own in zip(whole.arrays, other.arrays, strict=True):
            np.testing.assert_array_equal(bits(held[heads]), bits(own))
    now = [np.asarray(array.view(mx.uint8)).__array_interface__["data"] for array in whole.arrays]
    assert now == memory, "the pool was copied"
    assert packed[0].page_arrays == whole.arrays and not packed[1].page_arrays
