# SPDX-License-Identifier: Apache-2.0
"""Token types of requests with a pair of texts."""

import numpy as np
import pytest
from vllm import PoolingParams
from vllm.v1.core.sched.output import NewRequestData

from vllm_metal.engine.batch.requests import RequestState
from vllm_metal.engine.pooling.encoders.networks import TOKEN_TYPES
from vllm_metal.engine.pooling.encoders.profile import rows_of
from vllm_metal.engine.pooling.encoders.token_types import TokenTypes


def state(req_idx, length, second):
    extra = None if second is None else {"compressed_token_type_ids": second}
    params = PoolingParams(task="classify", extra_kwargs=extra)
    prompt = list(range(length))
    data = NewRequestData(f"r{req_idx}", prompt, [], None, params, (), 0, None)
    return RequestState(data, req_idx, prompt, [])


def test_rows_of_the_second_text_are_of_type_1():
    types = TokenTypes(max_num_reqs=3, num_types=2)
    for req_idx, (length, second) in enumerate([(5, (2, 4)), (3, None), (5, (5, 5))]):
        types.enter(state(req_idx, length, second))
    found = np.array(types.extras(rows_of([5, 3, 5]))[TOKEN_TYPES])
    assert found.tolist() == [0, 0, 1, 1, 0] + [0] * 8


def test_nothing_is_added_where_no_request_has_a_pair():
    types = TokenTypes(max_num_reqs=2, num_types=2)
    types.enter(state(0, 4, (1, 4)))
    types.leave(0)
    types.enter(state(0, 4, None))
    assert types.extras(rows_of([4])) == {}


def test_a_model_of_one_type_refuses_a_pair():
    with pytest.raises(ValueError, match="two token types, but the model has only one"):
        TokenTypes(max_num_reqs=1, num_types=1).enter(state(0, 4, (2, 4)))
