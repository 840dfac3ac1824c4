# SPDX-License-Identifier: Apache-2.0
"""Per-row values reach the modules that use them, in every forward."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from engine.models.test_compiled import calls
from engine.models.test_executor import build, executor, new_request
from mlx_lm.models.cache import make_prompt_cache

from vllm_metal.engine.attention.forward_inputs import of_rows
from vllm_metal.engine.batch.input_batch import prepare
from vllm_metal.engine.batch.requests import BlockTables, Requests

LENGTHS, STEPS = [44, 23, 1], 7  # past the end of a block


class Gained(nn.Module):
    """Multiplies its result by a value per row."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.given = inner, None

    def __call__(self, x):
        gain = of_rows("gain") if self.given is None else self.given
        assert gain.shape == x.shape[:2]
        return self.inner(x) * gain[..., None]


@pytest.mark.parametrize(
    ("model_type", "place"),
    [("llama", "mlp"), ("qwen3_next", "linear_attn.out_proj")],
    ids=["a dense model", "inside a module that goes from token to token"],
)
def test_each_row_has_its_own_value(model_type, place, monkeypatch):
    model, rng = build(model_type), np.random.default_rng(5)
    owner, name = model.model.layers[1], place
    if "." in place:
        owner, name = getattr(owner, place.split(".")[0]), place.split(".")[1]
    run = executor(model, model_type, 60)  # which looks at the layers before they are changed
    gained = Gained(getattr(owner, name))
    setattr(owner, name, gained)
    texts = rng.integers(0, 60, (len(LENGTHS), max(LENGTHS) + STEPS))
    gains = rng.uniform(0.5, 1.5, texts.shape).astype(np.float32)
    expected = []
    for text, gain in zip(texts, gains, strict=True):
        gained.given = mx.array(gain[None])
        expected.append(np.array(model(mx.array(text[None]), cache=make_prompt_cache(model))[0]))
    gained.given = None

    tables = BlockTables(1, len(LENGTHS), 5)
    requests, made = Requests(len(LENGTHS), 64, tables), calls(model, monkeypatch)
    for index, text in enumerate(texts):
        blocks = list(range(1 + index * 5, 6 + index * 5))
        requests.add_request(new_request(str(index), text.tolist(), blocks))
    order = [state.req_idx for state in requests]
    done = np.zeros(len(LENGTHS), np.int32)
    for step in range(1 + STEPS):
        counts = LENGTHS if step == 0 else [1] * len(LENGTHS)
        requests.num_computed_tokens_np[order] = done
        scheduled = {str(index): count for index, count in enumerate(counts)}
        batch = prepare(requests, scheduled, mx.zeros(len(LENGTHS), mx.int32))
        owners = np.repeat(np.arange(len(LENGTHS)), counts)
        extras = {"gain": mx.array(gains[owners, batch.positions_np])}
        hidden = run.forward_hidden(batch, tables, batch.inputs.with_extras(extras))
        before = len(made)
        logits = np.array(run.compute_logits(hidden))
        wanted = np.stack([expected[o][p] for o, p in zip(owners, batch.positions_np, strict=True)])
        np.testing.assert_allclose(logits, wanted, atol=3e-4, rtol=3e-4)
        del made[before:]  # of the head
        done += np.array(counts, np.int32)
    assert len(made) <= 5  # the prompts, and two steps of each of two widths of the block table


def test_a_value_that_no_forward_has_is_no_value():
    with pytest.raises(KeyError):
        of_rows("gain")
