# SPDX-License-Identifier: Apache-2.0
"""Engines stay within their budget, steps copy no pool, closed engines leak nothing."""

import contextlib
import ctypes
import gc
import json
import logging
import re
import threading

import mlx.core as mx
import psutil
import pytest
from e2e.harness import compares_resident_memory, engine, generate, greedy, text_tokens
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from vllm import LLM

from vllm_metal.engine.memory.advice import BudgetError
from vllm_metal.engine.sample import logit_chunks

MIB = 2**20
#: Python's own objects come and go; a leaked pool or model of these tests is several times this.
RSS_TOLERANCE = 24 * MIB

POOL = 256 * MIB


def peak_of_a_run(model, **options):
    tokens = text_tokens(model)
    prompts = [tokens[start : start + 40] for start in range(8)]
    with engine(model, kv_cache_memory_bytes=POOL, async_scheduling=True, **options) as llm:
        assert mx.get_active_memory() > POOL
        generate(llm, prompts, greedy(4))
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        generate(llm, prompts, greedy(12))
        return mx.get_peak_memory() - before


def test_no_step_copies_the_pool(short):
    """Not even one layer of it, which is half of this pool."""
    assert peak_of_a_run(short) < POOL // 4


@pytest.mark.slow
def test_no_step_copies_a_pool_that_groups_share(windowed):
    assert peak_of_a_run(windowed) < POOL // 4


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_no_step_of_a_real_model_copies_the_pool(request, model):
    assert peak_of_a_run(request.getfixturevalue(model)) < POOL // 4


def write_llama(folder, layers, kv_heads, head_size, max_len=512, vocab_size=256):
    """Writes a random model with little computation and the given K/V size."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    folder.mkdir(exist_ok=True)
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return str(folder)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("models") / "small", 2, 2, 16)


@pytest.fixture(scope="module")
def much_kv(tmp_path_factory):
    """A model with 128 KiB of K/V per token."""
    return write_llama(tmp_path_factory.mktemp("models") / "much_kv", 16, 8, 128)


def settings(share, **options):
    """Returns settings of an engine that sizes its pool, for this many bytes of the machine's."""
    return {
        "kv_cache_memory_bytes": None,
        "gpu_memory_utilization": share / psutil.virtual_memory().total,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "skip_tokenizer_init": True,
    } | options


def num_blocks(llm):
    return llm.llm_engine.vllm_config.cache_config.num_gpu_blocks


def table_of(text):
    """Parses GiB by label."""
    return {label: float(n) for label, n in re.findall(r"^  (.+?) +(-?[\d.]+) GiB$", text, re.M)}


def resident():
    """Returns this process's resident bytes, after malloc has returned free memory."""
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def open_use_and_close(model, times, share, **options):
    """Blocks and MLX's active memory of each engine, after it was closed, and the growth of RSS
    from the fifth to the last."""
    blocks, active, rss = [], [], []
    for number in range(times):
        llm = LLM(model, **settings(share, **options))
        blocks.append(num_blocks(llm))
        assert len(generate(llm, [[1, 2, 3]], greedy(3, detokenize=False))[0]) == 3
        llm.llm_engine.engine_core.shutdown()  # collects garbage itself
        del llm
        active.append(mx.get_active_memory())
        if number in (4, times - 1):
            rss.append(resident())
    return blocks, active, rss[-1] - rss[0]


@pytest.mark.more
@pytest.mark.parametrize("times", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_the_last_engine_gets_what_the_first_got(small, times, monkeypatch):
    # It warns of an exception, as it has no tokenizer; pytest keeps such records until a test ends,
    # and with them the frames of its traceback, which know the engine.
    monkeypatch.setattr(logging.getLogger("vllm.renderers.base"), "disabled", True)
    before = mx.get_active_memory()
    blocks, active, grown = open_use_and_close(small, times, 192 * MIB)
    assert min(blocks) == blocks[0]  # a first one may measure more: all of it is compiled
    assert max(abs(after - before) for after in active) < MIB
    compares_resident_memory()
    assert grown < RSS_TOLERANCE


@pytest.mark.slow
def test_the_fiftieth_engine_of_a_real_model_gets_what_the_first_got(smollm2):
    before = mx.get_active_memory()
    blocks, active, grown = open_use_and_close(smollm2, 50, 900 * MIB, skip_tokenizer_init=False)
    assert min(blocks) == blocks[0]
    assert max(abs(after - before) for after in active) < MIB
    compares_resident_memory()
    assert grown < RSS_TOLERANCE


@contextlib.contextmanager
def highest_rss():
    """Measures this process's peak memory during the block, in a list of one."""
    highest, done = [0], threading.Event()

    def watch():
        while not done.wait(0.005):
            highest[0] = max(highest[0], psutil.Process().memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield highest
    done.set()
    thread.join()


def flood(model, share, num_prompts, prompt_len, **options):
    """Returns MLX's peak with spare buffers, and RSS growth, with every block in use."""
    with engine(model, **settings(share, **options)) as llm:  # what only a first engine takes
        generate(llm, [[1]], greedy(1, detokenize=False))
    before, active = resident(), mx.get_active_memory()
    prompts = [[1 + (7 * i + j * j) % 250 for j in range(prompt_len)] for i in range(num_prompts)]
    params = greedy(2, detokenize=False)
    params.temperature, params.top_p, params.seed, params.logprobs = 1.0, 0.9, 1, 5
    with highest_rss() as rss, engine(model, **settings(share, **options)) as llm:
        assert num_prompts * prompt_len > 16 * num_blocks(llm), num_blocks(llm)
        mx.reset_peak_memory()
        generate(llm, prompts, params)
        peak = mx.get_peak_memory() - active + mx.get_cache_memory()
    return peak, rss[0] - before


def assert_within_five_percent(share, held, grown):
    assert held == pytest.approx(share, rel=0.05)
    compares_resident_memory()
    assert grown == pytest.approx(share, rel=0.05)


@pytest.mark.heavy
@pytest.mark.slow
def test_a_full_load_takes_what_was_budgeted(much_kv):
    share = 2048 * MIB
    options = {"max_num_batched_tokens": 256, "max_num_seqs": 32}
    assert_within_five_percent(share, *flood(much_kv, share, 60, 250, **options))


@pytest.mark.slow
def test_a_full_load_of_a_real_model_takes_what_was_budgeted(smollm2):
    share = 2048 * MIB
    options = {"max_num_batched_tokens": 256, "max_num_seqs": 32}
    assert_within_five_percent(share, *flood(smollm2, share, 135, 250, **options))


@pytest.mark.more
def test_prompt_logprobs_take_no_more_than_sampling(tmp_path, monkeypatch):
    """Logits of all 500 rows at once would take 64 MiB in float32."""
    monkeypatch.setattr(logit_chunks, "LOGITS_AT_ONCE", 8 * 2**15)
    model = write_llama(tmp_path, 1, 1, 16, vocab_size=2**15)
    options = {"max_num_batched_tokens": 512, "max_model_len": 512}
    with engine(model, **settings(256 * MIB, **options)) as llm:
        prompt = list(range(500))
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        (output,) = llm.generate(
            [{"prompt_token_ids": prompt}],
            greedy(1, detokenize=False, prompt_logprobs=1),
            use_tqdm=False,
        )
        assert mx.get_peak_memory() - before < 16 * MIB
    assert len(output.prompt_logprobs) == 500


def refusal(model, share, **options):
    """Returns the error of an engine that does not fit."""
    with pytest.raises(BudgetError) as raised, engine(model, **settings(share, **options)):
        pass
    return str(raised.value)


def test_a_utilization_that_an_error_advises_makes_it_fit(much_kv):
    message = refusal(much_kv, 96 * MIB)
    assert table_of(message)["- weights"] < 0
    advised = float(re.search(r"--gpu-memory-utilization ([\d.]+) or more", message)[1])
    options = settings(0, gpu_memory_utilization=advised)
    with engine(much_kv, **options) as llm:
        assert len(generate(llm, [[1] * 100], greedy(2, detokenize=False))[0]) == 2


def test_a_draft_model_that_does_not_fit_is_a_line_of_the_sum(small, much_kv):
    draft = {"method": "draft_model", "model": much_kv, "num_speculative_tokens": 2}
    message = refusal(small, 64 * MIB, speculative_config=draft)
    assert table_of(message)["- weights of the draft network"] < 0
    assert table_of(message)["= KV pool"] < 0
    assert "--gpu-memory-utilization" in message


def test_a_length_that_an_error_advises_makes_it_fit_and_one_more_does_not(much_kv):
    pool = 24 * MIB
    asked = {"kv_cache_memory_bytes": pool, "max_model_len": 256}
    message = refusal(much_kv, 2**30, **asked)
    tokens = int(re.search(r"--max-model-len (\d+) or less", message)[1])
    with engine(much_kv, **settings(2**30, **asked | {"max_model_len": tokens})) as llm:
        assert len(generate(llm, [[1] * (tokens - 2)], greedy(2, detokenize=False))[0]) == 2
    assert "--max-model-len" in refusal(much_kv, 2**30, **asked | {"max_model_len": tokens + 1})


@pytest.mark.parametrize(
    ("setting", "unit"), [("kv_cache_memory_bytes", 1), ("num_gpu_blocks_override", 2 * MIB)]
)
def test_a_pool_beyond_the_machines_memory_is_refused_with_the_sum(much_kv, setting, unit):
    message = refusal(much_kv, 2**30, **{setting: psutil.virtual_memory().total // unit})
    assert message.startswith("no memory is left for steps:")
    assert table_of(message)["= left for steps"] < 0
    option = "--" + setting.replace("_", "-")
    assert int(re.search(rf"{option} (\d+) or less", message)[1]) > 0


def test_a_pool_beyond_the_share_is_used_with_a_warning(small, caplog_vllm):
    with engine(small, **settings(MIB, kv_cache_memory_bytes=64 * MIB)) as llm:
        assert num_blocks(llm) * 2 * 2 * 2 * 16 * 16 * 4 <= 64 * MIB
    assert "is used as given, but it exceeds the free memory" in caplog_vllm.text


@pytest.fixture
def caplog_vllm(caplog):
    """Captures our logs, which vLLM's logger does not propagate."""
    logger = logging.getLogger("vllm_metal")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.more
def test_the_length_is_fitted_to_the_pool_where_vllm_is_asked_to(much_kv):
    options = settings(2**30, kv_cache_memory_bytes=40 * MIB, max_model_len=-1)
    with engine(much_kv, **options) as llm:
        fitted = llm.llm_engine.vllm_config.model_config.max_model_len
        assert fitted == (num_blocks(llm) - 1) * 16 < 512
        (output,) = llm.generate(
            [{"prompt_token_ids": [1] * (fitted - 5)}],
            greedy(50, detokenize=False),
            use_tqdm=False,
        )
        assert len(output.outputs[0].token_ids) == 5
        assert output.outputs[0].finish_reason == "length"
