# SPDX-License-Identifier: Apache-2.0
"""Counts how often each weight takes part in a product in the graph of a step's forward."""

from collections import Counter

import mlx.core as mx
import numpy as np
from engine.models.recurrent import VOCAB
from engine.models.test_executor import BLOCK, build, executor, new_request
from mlx.utils import tree_flatten, tree_unflatten

from vllm_metal.cli.fit.graph import record, recordable
from vllm_metal.engine.batch.input_batch import StepDrafts, prepare
from vllm_metal.engine.batch.requests import BlockTables, Requests

#: Of one step: the rows that each request has computed before, those of the step that are certain,
#: and the drafts behind them. A chunk of a prompt that ends one block and begins another, two
#: requests that decode, two that verify drafts.
MIXTURE = ((17, 23, 0), (20, 1, 0), (9, 1, 0), (12, 1, 1), (30, 1, 4))
_PRODUCTS = ("Matmul", "AddMM", "QuantizedMatmul", "GatherMM", "GatherQMM")


def rows_of_products(graph, names):
    """By name of a parameter the products that read it, as it is or in another shape.

    Of each the rows of what the parameter is multiplied with: 1 of one with a vector.

    Args:
        graph: recorded; its first inputs are the parameters.
        names: of those, in order.
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
    """By name of a parameter the number of those products."""
    return Counter({name: len(found) for name, found in rows_of_products(graph, names).items()})


def counted(model_type, mixture=MIXTURE):
    """The same of one step's forward of a family's small model."""
    return products(*recorded(build(model_type), model_type, mixture))


def recorded(model, model_type, mixture=MIXTURE):
    """The graph of one step's forward of a model, and the names of its parameters."""
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
    """Block tables, and the step's batch; the rows before it are computed."""
    rng = np.random.default_rng(5)
    requests = Requests(len(mixture), 128, BlockTables(1, len(mixture), width))
    newest = mx.zeros(len(mixture), mx.int32)
    for index, (before, certain, _) in enumerate(mixture):
        # A request that decodes has its last token from the step before.
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
