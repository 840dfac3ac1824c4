# SPDX-License-Identifier: Apache-2.0
"""Counts the products of each weight in the graph of a step's forward."""

from collections import Counter

import mlx.core as mx
import numpy as np
from engine.models.recurrent import VOCAB
from engine.models.test_executor import BLOCK, build, executor, new_request
from mlx.utils import tree_flatten, tree_unflatten

from vllm_metal.cli.fit.graph import record, recordable
from vllm_metal.engine.batch.input_batch import StepDrafts, prepare
from vllm_metal.engine.batch.requests import BlockTables, Requests

#: A step's rows per request: already computed, certain in this step, and drafts. A prompt
#: chunk that ends one block and starts another, two requests that decode, two that verify
#: drafts.
MIXTURE = ((17, 23, 0), (20, 1, 0), (9, 1, 0), (12, 1, 1), (30, 1, 4))
_PRODUCTS = ("Matmul", "AddMM", "QuantizedMatmul", "GatherMM", "GatherQMM")


def rows_of_products(graph, names):
    """Maps parameters to the row counts of the products that read them, possibly reshaped.

    The counts are the rows of the other factor: 1 for a vector.

    Args:
        graph: recorded graph; its first inputs are the parameters.
        names: parameters' names in order.
    """
    whose = {array: {name} for array, name in zip(graph.inputs, names, strict=False)}
    rows = {name: [] for name in names}
    for operation in graph.operations:
        read = set().union(*(whose.get(array, ()) for array in operation.inputs))
        if operation.kind in _PRODUCTS:
            for name in read:
                shape, _ = graph.arrays[operation.inputs[0]]
                rows[name].append(shape[-2])
        elif len(operation.inputs) == 1:  # a view, or another dtype
            whose |= dict.fromkeys(operation.outputs, read)
    return rows


def products(graph, names):
    """Maps parameters to the number of those products."""
    return Counter({name: len(found) for name, found in rows_of_products(graph, names).items()})


def counted(model_type, mixture=MIXTURE):
    """Counts for one step of a family's small model."""
    return products(*recorded(build(model_type), model_type, mixture))


def recorded(model, model_type, mixture=MIXTURE):
    """Records the graph of one step of a model; returns it and the parameters' names."""
    width = -(-max(map(sum, mixture)) // BLOCK)
    run = executor(model, model_type, num_blocks=1 + width * len(mixture))
    tables, batch = _step(run, mixture, width)
    names, parameters = zip(*tree_flatten(model.parameters()), strict=True)

    def forward(*given):
        model.update(tree_unflatten(list(zip(names, given, strict=True))))
        with run.step(batch, tables) as caches:
            hidden_states = run.parts.forward_hidden(batch.inputs, caches)
        return [run.compute_logits(batch.of_logits(hidden_states))]

    with recordable(metal=False):
        return record(forward, parameters), names


def _step(run, mixture, width):
    """Returns block tables and a step's batch; earlier rows are computed."""
    rng = np.random.default_rng(5)
    requests = Requests(len(mixture), 128, BlockTables(1, len(mixture), width))
    newest = mx.zeros(len(mixture), mx.int32)
    for index, (before, certain, _) in enumerate(mixture):
        # A decoding request has its last token from the previous step.
        length = before if certain == 1 else before + certain
        tokens = rng.integers(0, VOCAB, length).tolist()
        blocks = [1 + width * index + block for block in range(width)]
        requests.add_request(new_request(str(index), tokens, blocks))
    first = {str(index): before for index, (before, *_) in enumerate(mixture)}
    mx.eval(run.forward_hidden(prepare(requests, first, newest), requests.block_tables))
    counts = np.array([drafts for *_, drafts in mixture], np.int32)
    for index, (before, certain, _) in enumerate(mixture):
        row = requests[str(index)].req_idx
        requests.num_computed_tokens_np[row] = before
        requests.num_tokens_np[row] = before + certain
    drafts = StepDrafts(mx.ones((len(mixture), int(counts.max())), mx.int32), counts, counts)
    rows = {str(index): certain + k for index, (_, certain, k) in enumerate(mixture)}
    return requests.block_tables, prepare(requests, rows, newest, drafts)
