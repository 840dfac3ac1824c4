# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal fit` as a user types it."""

import json
import re
from contextlib import nullcontext

import pytest

from vllm_metal.cli.main import main
from vllm_metal.engine.models import architectures
from vllm_metal.identity.model_files import ModelLoadError

#: Names in `memory` of `fit --json`, on which programs rely.
LINES = {
    *("total", "beyond_utilization", "margin", "in_use", "weights", "draft_weights", "adapters"),
    *("step_peak", "long_contexts", "transfers", "images", "buffer_cache", "states", "unused"),
}

#: Llama-3-8B's config.json, as published.
LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def llama3_8b_shapes():
    hidden, inner, vocab, kv = 4096, 14336, 128256, 1024
    yield from {"lm_head": (vocab, hidden), "model.embed_tokens": (vocab, hidden)}.items()
    yield "model.norm", (hidden,)
    for index in range(32):
        layer = f"model.layers.{index}."
        yield f"{layer}self_attn.q_proj", (hidden, hidden)
        yield f"{layer}self_attn.k_proj", (kv, hidden)
        yield f"{layer}self_attn.v_proj", (kv, hidden)
        yield f"{layer}self_attn.o_proj", (hidden, hidden)
        yield f"{layer}mlp.gate_proj", (inner, hidden)
        yield f"{layer}mlp.up_proj", (inner, hidden)
        yield f"{layer}mlp.down_proj", (hidden, inner)
        yield f"{layer}input_layernorm", (hidden,)
        yield f"{layer}post_attention_layernorm", (hidden,)


@pytest.fixture(scope="module")
def llama3_8b(tmp_path_factory):
    """A model folder with 16 GB of weights in a sparse file."""
    folder = tmp_path_factory.mktemp("Llama-3-8B")
    (folder / "config.json").write_text(json.dumps(LLAMA3_8B))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    header, end = {}, 0
    for name, shape in llama3_8b_shapes():
        start, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return str(folder)


def ask(capsys, *arguments):
    """Returns the exit status and the printed JSON."""
    status = main(["fit", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_llama3_8b_takes_128_kib_a_token_and_16_gb_of_weights(llama3_8b, capsys):
    status, found = ask(capsys, llama3_8b, "--memory", "32GB", "--context", "8k")
    assert status == 0 and found["fits"]
    assert found["weights"] == 16_060_522_496  # 8,030,261,248 parameters
    assert found["kv_cache"]["auto"]["token_bytes"] == 128 * 1024
    assert found["kv_cache"]["fp8"]["token_bytes"] == 65 * 1024  # with scales
    auto = found["kv_cache"]["auto"]
    assert auto["requests"] == auto["pool"] // (16 * 128 * 1024) // (8192 // 16)
    assert sum(auto["memory"].values()) == auto["pool"]
    assert set(auto["memory"]) == set(found["kv_cache"]["fp8"]["memory"]) == LINES
    # By hand, of 2048 rows in 16 bits: K/V, and in a layer two states, and what the MLP's gate and
    # its other half give. Rounded up as the engine rounds.
    by_hand = 2048 * (128 * 1024 + 2 * (2 * 4096 + 2 * 14336))
    assert 0 <= auto["step_peak"] - by_hand <= 16 * 2**20


@pytest.mark.more
def test_a_smaller_mac_has_less_room_and_more_memory_more(llama3_8b, capsys):
    pools = []
    for memory in ("24GB", "32GB"):
        _, found = ask(capsys, llama3_8b, "--memory", memory)
        pools.append(found["kv_cache"]["auto"]["pool"])
    assert pools[0] < 0 < pools[1]


def test_the_text_says_what_fits_and_the_command_to_paste(llama3_8b, capsys):
    line = [llama3_8b, "--memory", "32GB", "--context", "4k", "--requests", "4"]
    assert main(["fit", *line, "--max-num-batched-tokens", "1024"]) == 0
    out = capsys.readouterr().out
    assert "on a Mac of 32 GB" in out
    assert re.search(r"K and V of a token +128\.0 KiB +65\.0 KiB", out)
    assert "Fits: 4 requests at once of 4,096 tokens: 2.00 GiB of KV cache." in out
    command = f"vllm serve {llama3_8b} --max-model-len 4096 --max-num-seqs 4"
    assert f"\n  {command} --max-num-batched-tokens 1024\n" in out
    assert f"\n  {command} --max-num-batched-tokens 1024 --kv-cache-dtype fp8\n" in out


def test_a_table_on_disk_is_told_apart_from_weights(folder, capsys):
    line = [str(folder("gemma4, per layer")), "--memory", "16GB", "--embedding-tables", "disk"]
    status, found = ask(capsys, *line)
    table = 600 * 4 * 64 * 4  # of float32
    assert status == 0 and found["tables_on_disk"] == table
    assert ask(capsys, *line[:-2])[1]["tables_on_disk"] == 0  # a small model has room
    assert '"embedding_tables": "disk"' in found["commands"][0]
    assert main(["fit", *line]) == 0
    assert re.search(r"embedding tables that stay on disk +0\.00 GiB", capsys.readouterr().out)


def test_what_does_not_fit_is_a_status_of_1_and_says_what_would(llama3_8b, capsys):
    line = [llama3_8b, "--memory", "32GB", "--context", "8k", "--requests", "5"]
    status, found = ask(capsys, *line)
    assert status == 1 and not found["fits"]
    most = found["kv_cache"]["auto"]["requests"]
    assert 0 < most < 5 <= found["kv_cache"]["fp8"]["requests"]
    assert found["changes"][0] == f"--requests {most} or less"
    (command,) = found["commands"]
    assert command.endswith("--kv-cache-dtype fp8")
    # Each of them holds.
    assert ask(capsys, *line[:-1], str(most))[0] == 0
    assert ask(capsys, *line, "--kv-cache-dtype", "fp8")[0] == 0
    for change in found["changes"]:
        if longest := re.fullmatch(r"--max-model-len (\d+) or less", change):
            assert ask(capsys, *line, "--context", longest[1])[0] == 0
            assert ask(capsys, *line, "--context", str(int(longest[1]) + 16))[0] == 1


@pytest.mark.more
def test_drafts_of_a_model_with_states_leave_less_for_the_pool(folder, capsys):
    line = [str(folder("qwen3_next, states")), "--memory", "8GB", "--requests", "64"]
    line += ["--gpu-memory-utilization", "0.4"]
    _, without = ask(capsys, *line)
    status, found = ask(capsys, *line, "--num-speculative-tokens", "4")
    assert status == 0
    pools = [of["kv_cache"]["auto"]["pool"] for of in (without, found)]
    taken = [-of["kv_cache"]["auto"]["memory"]["states"] for of in (without, found)]
    # A draft takes what it leaves, and no state: heads of 32 have inputs of a tenth of one.
    of_drafts = taken[1] - taken[0]
    assert 0 < of_drafts < 0.3 * 64 * 4 * found["kv_cache"]["auto"]["state_bytes"]
    assert pools[0] > pools[1]
    drafts = '{"method": "ngram", "num_speculative_tokens": 4}'
    assert f"--speculative-config '{drafts}'" in found["commands"][0]


def test_on_this_machine_the_cpu_is_given_float32(folder, capsys):
    status, found = ask(capsys, str(folder("llama")))
    assert status == 0 and found["machine"] == "this machine's CPU"
    assert found["dtype"] == "float32"
    assert found["context"] == 512  # the most the model is made for


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "16k"], "--context 16384 is longer than the model's maximum of 8192 tokens"),
        (["--kv-cache-dtype", "fp4"], "--kv-cache-dtype fp4 is not supported: choose one of auto"),
        (
            ["--requests", "80", "--max-num-batched-tokens", "64"],
            "80 requests at once need --max-num-batched-tokens 80",
        ),
        (["--block-size", "8"], "--block-size 8 is not supported: choose one of (16, 32)"),
    ],
)
def test_what_the_engine_refuses_is_one_line(llama3_8b, capsys, arguments, message):
    assert main(["fit", llama3_8b, "--memory", "32GB", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_model_that_the_engine_does_not_serve_is_refused_in_its_words(tmp_path, capsys):
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import phi3small

    config = {
        "model_type": "phi3small",
        "vocab_size": 100352,
        "hidden_size": 32,
        "ff_intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "layer_norm_epsilon": 1e-5,
    }
    model = phi3small.Model(phi3small.ModelArgs.from_dict(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    assert main(["fit", str(tmp_path), "--memory", "16GB", "--context", "1k"]) == 1
    reason = "model_type 'phi3small' computes attention in layers.0 with code of its own"
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model_type", "architecture", "is_served"),
    [
        ("gemma4_unified", "Gemma4UnifiedForConditionalGeneration", True),
        ("qwen3", "Qwen3ForSequenceClassification", True),
        ("lfm2", "Lfm2BidirectionalModel", False),
        ("phi3", "Phi3VForCausalLM", False),
        ("internlm3", "MadeUpForCausalLM", True),  # as mlx-lm's module of the model_type
    ],
)
def test_architectures_are_judged_as_by_serve(model_type, architecture, is_served):
    content = {"model_type": model_type, "architectures": [architecture]}
    with nullcontext() if is_served else pytest.raises(ModelLoadError, match=architecture):
        architectures.check(content)


def test_where_there_is_no_metal_device_the_mac_must_be_named(folder, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_METAL_DEVICE", "off")
    assert main(["fit", str(folder("llama"))]) == 1
    assert "give the memory of a Mac, such as --memory 24GB" in capsys.readouterr().err
    assert main(["fit", str(folder("llama")), "--memory", "32GB"]) == 0


@pytest.mark.more
def test_ranks_of_one_mac_have_a_part_each(llama3_8b, capsys):
    line = [llama3_8b, "--context", "4k", "--memory"]
    _, alone = ask(capsys, *line, "64GB")
    _, half = ask(capsys, *line, "64GB", "--data-parallel-size-local", "2")
    whole, part = (found["kv_cache"]["auto"]["memory"]["total"] for found in (alone, half))
    assert part == whole // 2
    main(["fit", *line, "64GB", "--data-parallel-size-local", "2"])
    assert ", 1 of 2 parts" in capsys.readouterr().out
    assert half["weights"] == alone["weights"]
    assert "--data-parallel-size 2" in half["commands"][0]
    assert "--data-parallel" not in alone["commands"][0]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, which must be at most 10000"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"num_attention_heads": 0}, "num_attention_heads=0, which must be at least 1"),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, "factor=1e+300"),
        ({"hidden_size": float("nan")}, "hidden_size=nan"),
        ({"num_attention_heads": "many"}, "heads='many', which is not a number"),
        (None, "holds no JSON object"),
        ("{", "is not JSON"),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", "nested deeper than 64"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_strangers_config_is_an_error_in_one_line(llama3_8b, tmp_path, capsys, changed, said):
    """Each is rejected before anything is built: it took all memory or raised a traceback."""
    text = changed
    if not isinstance(text, str):
        text = json.dumps([] if changed is None else LLAMA3_8B | changed)
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors").symlink_to(f"{llama3_8b}/model.safetensors")
    assert main(["fit", str(tmp_path), "--memory", "64GB"]) == 1
    assert said in capsys.readouterr().err
