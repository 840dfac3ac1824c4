# SPDX-License-Identifier: Apache-2.0
"""Weights and bytes per token, against the loaded model and the formula."""

import gc
from pathlib import Path

import mlx.core as mx
import pytest
import torch
from cli.fit.models import MODELS, read, settings, token_bytes
from engine.models import further, of_mlx_vlm
from engine.models.recurrent import write_model
from engine.models.v41_formulas import MEMORY, of_v41

from vllm_metal.cli.fit import engine
from vllm_metal.cli.fit.estimate import estimate
from vllm_metal.cli.fit.machine import Machine
from vllm_metal.engine.lora.adapters import Adapters
from vllm_metal.engine.models import loader
from vllm_metal.engine.weights.disk_tables import TableRule

MAC = Machine.mac(16 << 30)


#: One of each kind: weights that are dropped, tied and quantized, windows, experts, states.
EACH_KIND = (
    *("llama", "llama, 8 bits, tied", "gemma3, windows", "qwen3_moe, 4 bits"),
    "lfm2, convolutions",
)
SECOND = ("llama, grouped, tied", "llama, bfloat16", "phi3, fused", "mixtral")
CASES = [
    *EACH_KIND,
    *(pytest.param(name, marks=pytest.mark.more) for name in SECOND),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in MODELS
        if name not in EACH_KIND + SECOND
    ),
]


@pytest.mark.parametrize("name", CASES)
def test_weights_are_what_the_loader_holds_to_the_byte(folder, name):
    path = folder(name)
    limit = mx.set_cache_limit(0)  # else arrays may lie in spare buffers that are larger
    try:
        for dtype in (torch.float32, torch.bfloat16):
            gc.collect()  # what the reading of layers left behind
            before = mx.get_active_memory()
            model = loader.load(settings(path, dtype))
            mx.synchronize()
            held = mx.get_active_memory() - before
            del model
            assert read(path, dtype).weights == held
    finally:
        mx.set_cache_limit(limit)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("gemma4, per layer", 4 * 64 * 4),  # float32 in the file
        # 4 bits of a value, and a scale and a bias of 32 values.
        pytest.param("gemma4, per layer, 4 bits", 4 * 64 // 2 + 2 * 8 * 4, marks=pytest.mark.more),
    ],
)
def test_a_table_on_disk_is_no_weight(folder, name, row):
    path, on_disk = folder(name), TableRule("disk", 0)
    whole, found = read(path, torch.bfloat16), read(path, torch.bfloat16, tables=on_disk)
    assert (whole.tables, found.tables) == (0, 600 * row)
    gc.collect()
    before = mx.get_active_memory()
    model = loader.load(settings(path, torch.bfloat16), tables=on_disk)
    assert loader.weight_bytes(model) == found.weights < whole.weights
    assert mx.get_active_memory() - before < whole.weights
    estimates = [estimate(each, settings(path, torch.bfloat16), MAC) for each in (whole, found)]
    assert [each.measured.weights for each in estimates] == [whole.weights, found.weights]
    assert estimates[1].tables == 600 * row


@pytest.mark.parametrize(
    ("family", "values"),
    [
        (further.FAMILIES["longcat_flash_ngram"], 16 * (129 + 131 + 133 + 135)),
        # Primes from 50 on, and rows of 24 / 6 values.
        (of_mlx_vlm.FAMILIES["qwen4_exp_text"], 4 * (384 + 552)),
        (of_v41(**MEMORY), 8 * (240 + 306)),
    ],
    ids=lambda case: getattr(case, "module", ""),
)
def test_tables_of_ngrams_are_no_weights(tmp_path, family, values):
    folder = Path(write_model(family, tmp_path / "model"))
    whole, found = (
        read(folder, torch.float32, tables=rule) for rule in (None, TableRule("disk", 0))
    )
    nbytes = 4 * values  # float32
    assert (whole.tables, found.tables) == (0, nbytes)
    assert whole.weights - found.weights == nbytes
    planned = estimate(found, settings(folder, torch.float32), MAC)
    assert (planned.measured.weights, planned.tables) == (found.weights, nbytes)


@pytest.mark.more
def test_casts_of_weights_are_no_memory_of_requests(tmp_path):
    """Routers compute in float32 in each step, and their weights have 16 bits."""
    found = []
    for count in (4, 64):
        family = of_v41(**MEMORY | {"n_routed_experts": count})
        folder = Path(write_model(family, tmp_path / str(count)))
        config = settings(folder, torch.bfloat16)
        found.append(estimate(read(folder, torch.bfloat16), config, MAC).measured.states)
    # Of two requests in a step, half of one layer's cast.
    assert found[0].request <= found[1].request <= found[0].request + 64 * 64 * 4 // 2


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "lfm2, convolutions"),
        *(pytest.param(name, marks=pytest.mark.more) for name in EACH_KIND[1:4]),
        *(case for case in CASES if case not in EACH_KIND),
    ],
)
def test_bytes_of_a_token_are_those_of_the_formula(folder, name):
    model = read(folder(name), torch.bfloat16)
    for cache_dtype, row in {"auto": (2, 0), "fp8": (1, 2)}.items():
        config = settings(folder(name), torch.bfloat16, cache_dtype=cache_dtype)
        found = estimate(model, config, MAC)
        assert found.token_bytes == token_bytes(name, *row)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("deepseek_v32, index keys", 3 * (512 + 64 + 128)),
        ("minimax_m3, index keys", 3 * 2 * 2 * 128 + 2 * 128),
    ],
)
def test_sparse_attention_is_estimated_without_a_mac(folder, name, row):
    """A step's chosen rows and scores are known without a Mac's kernels."""
    path = folder(name)
    found = [
        estimate(
            read(path, torch.bfloat16),
            settings(path, torch.bfloat16, max_num_batched_tokens=256, max_model_len=longest),
            MAC,
        )
        for longest in (64, 512)
    ]
    assert found[0].token_bytes == row * 2
    assert found[0].measured.attention < found[1].measured.attention


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "latents", "keys"),
    [
        ("hy_v4", 4 * (32 + 8), 2 * 16),
        ("glm5_next", 2 * 32, 1 * 2 * 12),
        ("qwen4_exp", 2 * 2 * 2 * 16, 2 * 24),
    ],
)
def test_layers_that_share_a_choice_of_positions_keep_no_index_keys(name, latents, keys, tmp_path):
    """Half of the last two's layers keep states, and GLM-5.3's keys have gates beside them."""
    path = Path(write_model(of_mlx_vlm.FAMILIES[name], tmp_path))
    found = estimate(read(path, torch.bfloat16), settings(path, torch.bfloat16), MAC)
    assert found.token_bytes == (latents + keys) * 2
    assert (found.state_bytes > 0) == (name != "hy_v4")


@pytest.mark.more
@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v41"])
def test_entries_of_groups_take_a_slot_in_each_block(name, tmp_path):
    """One page of all layers' entries, as wide as the widest rows that windows keep."""
    family = (further.FAMILIES | of_mlx_vlm.FAMILIES)[name]
    path = Path(write_model(family, tmp_path))
    found = estimate(read(path, torch.bfloat16), settings(path, torch.bfloat16), MAC)
    sizes = family.config.get("text_config", family.config)
    widest = 4 * sizes["head_dim"]  # V4.1's are values and gates of an entry, in two parts each
    if name == "deepseek_v4":
        widest += 4 * sizes["index_head_dim"]
    assert found.needs.block_bytes == found.block_size * widest * 2
    assert found.measured.attention > 0


def test_adapters_are_those_of_the_engine(folder):
    path = folder("llama")
    limits = engine.adapters(3, None, 8)
    config = settings(path, torch.bfloat16)
    config.lora_config = limits
    model = read(path, torch.bfloat16)
    found = estimate(model, config, MAC).measured.adapters
    of_engine = Adapters(loader.load(settings(path, torch.bfloat16)), limits, mx.bfloat16).nbytes
    assert found == of_engine.slots + of_engine.cached > 0
    assert (
        estimate(read(path, torch.bfloat16), settings(path, torch.bfloat16), MAC).measured.adapters
        == 0
    )
    with pytest.raises(ValueError, match="need --max-loras"):
        engine.adapters(None, 4, None)
