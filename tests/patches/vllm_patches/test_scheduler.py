# SPDX-License-Identifier: Apache-2.0
"""A request's cache_salt reaches the worker with the request, through pickling too."""

import json
import pickle

import pytest
from patches.vllm_patches import doubles
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.request import Request

from vllm_metal.engine.batch.requests import BlockTables, Requests


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(doubles.MODEL))
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=256)
    return doubles.make_scheduler(args.create_engine_config(), num_blocks=64)


@pytest.mark.parametrize(("salt", "expected"), [("pepper", "pepper"), (None, None), ("", None)])
def test_the_worker_is_told_of_it(scheduler, salt, expected):
    """A client's own parameters never pass for a salt."""
    params = SamplingParams(extra_args={"cache_salt": "forged", "mine": [1]})
    before = repr(params)
    request = Request(f"of {salt!r}", [1, 2], params, None, cache_salt=salt)
    scheduler.add_request(request)
    (sent,) = pickle.loads(pickle.dumps(scheduler.schedule())).scheduled_new_reqs
    requests = Requests(1, 16, BlockTables(1, 1, 1))
    assert requests.add_request(sent).cache_salt == expected
    assert repr(params) == before
