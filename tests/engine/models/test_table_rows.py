# SPDX-License-Identifier: Apache-2.0
"""Rows of tables on disk are read before the device computes with them."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vllm_metal.engine.models.table_rows import TableRows
from vllm_metal.engine.weights.disk_tables import DiskEmbedding
from vllm_metal.engine.weights.files import Header

ROWS, WIDTH = 11, 4


def test_ids_may_follow_from_rows_of_layers_before(tmp_path):
    """As on Macs, where kernels wait for what the layers before wrote into shared storages."""
    rng, model, dense = np.random.default_rng(0), nn.Module(), []
    model.layers = [nn.Module() for _ in range(3)]
    for index, layer in enumerate(model.layers):
        dense.append(rng.integers(0, ROWS, (ROWS, WIDTH)).astype(np.float32))
        path = tmp_path / str(index)
        path.write_bytes(dense[-1].tobytes())
        header = Header("F32", (ROWS, WIDTH), path, dense[-1].nbytes, 0)
        name = f"layers.{index}.ngram_embedding"
        layer.ngram_embedding = DiskEmbedding(name, {"weight": [header]}, mx.float32, None)
    rows, ids = TableRows(model), np.array([[3, 0, 7]])
    found, expected = mx.array(ids), ids
    rows.reserve(SimpleNamespace(input_ids=found))
    with rows.built(early=False):
        for layer in model.layers:
            found = layer.ngram_embedding(found).sum(axis=-1).astype(mx.int32) % ROWS
    for table in dense:
        expected = table[expected].sum(axis=-1).astype(int) % ROWS
    assert rows.are_due
    rows.read()
    assert np.array(found).tolist() == expected.tolist() and not rows.are_due
