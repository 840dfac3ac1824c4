# SPDX-License-Identifier: Apache-2.0
"""Memory of one of several ranks, relative to the whole model."""

import pytest
import torch
from cli.fit.models import settings

from vllm_metal.cli.fit import ranks
from vllm_metal.cli.fit.estimate import Model, estimate
from vllm_metal.cli.fit.machine import Machine
from vllm_metal.engine.distributed.sharding import ShardingError

MAC = Machine.mac(16 << 30)


def found(path, size):
    with ranks.alone(size) as ring:
        model = Model.read(path, "llama", torch.bfloat16, ring=ring)
        return model, estimate(model, settings(path, torch.bfloat16), MAC)


def test_a_rank_has_its_share_of_layers_and_of_a_tokens_kv(folder):
    (one, of_one), (two, of_two) = (found(folder("llama"), size) for size in (1, 2))
    args = one.parts.text_args
    projections = 2 * args.head_dim * (args.num_attention_heads + args.num_key_value_heads)
    layer = (projections + 3 * args.intermediate_size) * args.hidden_size
    assert one.weights - two.weights == args.num_hidden_layers * layer * 2 // 2
    assert of_two.token_bytes * 2 == of_one.token_bytes
    assert of_two.measured.forward <= of_one.measured.forward


def test_a_number_that_does_not_divide_the_heads_is_refused(folder):
    with pytest.raises(ShardingError, match="--tensor-parallel-size 3 does not divide"):
        found(folder("llama"), 3)
