# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal fit` for encoders: no KV cache, and a step's real memory."""

import json
from argparse import Namespace

import mlx.core as mx
import pytest
from engine.pooling.encoders import checkpoints

from vllm_metal.cli.fit import command
from vllm_metal.engine.memory.planner import peak_of
from vllm_metal.engine.pooling.encoders.executor import EncoderExecutor
from vllm_metal.engine.pooling.encoders.loading import lazy_encoder
from vllm_metal.engine.pooling.encoders.profile import largest_lengths, rows_of
from vllm_metal.engine.pooling.encoders.served import ARCHITECTURES


def ask(folder, **options):
    return vars(command.options_for(str(folder), None)) | {"json": True} | options


def answer(capsys, folder, **options):
    status = command.run(Namespace(**ask(folder, **options)))
    return status, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def modernbert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modernbert")
    checkpoints.make("ModernBertModel", folder)
    return folder


def test_the_peak_is_about_that_of_a_step(capsys, modernbert):
    status, found = answer(capsys, modernbert, max_num_batched_tokens=500)
    assert (status, found["fits"], found["context"], found["step"]) == (0, True, 256, 500)
    encoder, _ = lazy_encoder(modernbert, ARCHITECTURES["ModernBertModel"], mx.float32)
    mx.eval(encoder.model.parameters())
    rows = rows_of(largest_lengths(500, 256, 256))
    executor = EncoderExecutor(encoder, 16)
    measured = peak_of(lambda: mx.eval(executor.forward_hidden(rows, None)))
    assert 0.5 < -found["memory"]["step_peak"] / measured < 1.5
    options = "--max-model-len 256 --max-num-batched-tokens 500"
    assert found["commands"] == [f"vllm serve {modernbert} {options}"]


def test_a_machine_may_be_too_small(capsys, modernbert):
    status, found = answer(capsys, modernbert, memory=1 << 20)
    assert status == 1 and not found["fits"] and not found["commands"]


def test_text_says_that_there_is_no_kv_cache(capsys, modernbert):
    assert command.run(Namespace(**ask(modernbert, json=False))) == 0
    assert "keeps no KV cache" in capsys.readouterr().out


def test_a_context_beyond_the_positions_is_refused(modernbert):
    with pytest.raises(ValueError, match="longer than the model's maximum of 256 tokens"):
        command.run(Namespace(**ask(modernbert, context=300)))


def test_a_mac_serves_it_in_float16(capsys, modernbert):
    """vLLM's `_resolve_auto_dtype` chooses float16 for models that pool."""
    _, found = answer(capsys, modernbert, memory=16 << 30)
    assert found["dtype"] == "float16"
