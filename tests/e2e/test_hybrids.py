# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent layers: text under load equals mlx-lm's dense forward."""

import numpy as np
import pytest
from e2e.disk import HITS
from e2e.harness import Dense, counters, engine, free_blocks, generate, greedy, run_out
from e2e.peers import consumer, decode, free_port, prefill, producer
from engine.models import further, latent, of_mlx_vlm, published
from engine.models.recurrent import FAMILIES, VOCAB, Family, write_model
from engine.models.v41_formulas import write_with_memory

from vllm_metal.engine.models.executor import ModelExecutor

MAX_TOKENS = 40
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}
#: One of each kind of layer; the first stands in the quick tests.
KINDS = ("qwen3_next", "falcon_h1", "lfm2")


def families(quick=(), more=()):
    """Marks all families; those in neither list run nightly."""
    marks = dict.fromkeys(quick, ()) | dict.fromkeys(more, pytest.mark.more)
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks.get(name, pytest.mark.slow)) for name in FAMILIES]
    )


#: Tokens that prompts share at their beginning; blocks hold 256 tokens where there are only
#: states, unless the user asks for less.
SHARED = 100
#: Blocks of pools in which not all requests that run at once have room; 60 for other models.
BLOCKS = {"qwen3_next, large states": 26, "recurrent_gemma": 30}


#: Counters that random traffic shows.
TOLD = (
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrids")
    return {name: write_model(family, folder / name) for name, family in FAMILIES.items()}


def prompts_of(count, seed=0):
    """Makes prompts of 4 to 105 tokens; half share a prefix, some are repetitive."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, VOCAB, SHARED).tolist()
    lengths = rng.permutation(np.linspace(1, SHARED, count).astype(int)).tolist()
    found = []
    for index, length in enumerate(lengths):
        begin = shared[:length] if index % 2 else rng.integers(3, VOCAB, length).tolist()
        if index % 4 == 3:
            begin = (begin[: length // 2] * 2)[:length]
        found.append([*begin, *rng.integers(3, VOCAB, 4).tolist()])
    return found


def hybrid_engine(model, **options):
    settings = {
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "additional_config": {"fixed_draft_length": True},
    }
    if "mamba2" in model:
        settings["block_size"] = 32
    return engine(model, **(settings | options))


def greedy_ids():
    return greedy(MAX_TOKENS, detokenize=False)


def check_passes(model, passes=2, count=16, judge=Dense, **options):
    """Serves the prompts `passes` times, checks every text; returns counters per pass."""
    dense, seen, prompts = judge(model), [], prompts_of(count)
    with hybrid_engine(model, **options) as llm:
        free = free_blocks(llm)
        for _ in range(passes):
            for prompt, tokens in zip(prompts, generate(llm, prompts, greedy_ids()), strict=True):
                assert len(tokens) == MAX_TOKENS
                dense.check(prompt, tokens)
            seen.append(counters(llm))
        run_out(llm)
        assert free_blocks(llm) == free, "blocks were never freed"
    return seen


@families(KINDS[:1], KINDS[1:])
def test_hits_drafts_and_preemptions(folders, name):
    """The pool has blocks for a few of the running requests, and few drafts are right."""
    first, second = check_passes(
        folders[name], num_gpu_blocks_override=BLOCKS.get(name, 60), speculative_config=NGRAM
    )
    if name not in BLOCKS:  # where so few blocks leave nothing to be found
        assert 0 < first["vllm:prefix_cache_hits"] < second["vllm:prefix_cache_hits"]
    drafted, accepted = (
        second[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted")
    )
    assert 0 < accepted < drafted
    if name != "mamba2":  # whose requests need two blocks each
        assert second["vllm:num_preemptions"] > 0


#: A plain model of the same vocabulary, which guesses for the others.
DRAFT = Family("llama", "LlamaForCausalLM", {"num_hidden_layers": 1, "head_dim": 16})
LATENT = "deepseek_v3"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen3_next", marks=pytest.mark.more),
        pytest.param(LATENT, marks=pytest.mark.slow),
        pytest.param("jamba", marks=pytest.mark.slow),
    ],
)
def test_a_draft_model_beside_states_or_latents(folders, name, tmp_path):
    model = folders.get(name) or write_model(latent.FAMILIES[name], tmp_path / name)
    draft = {
        "method": "draft_model",
        "model": write_model(DRAFT, tmp_path / "draft"),
        "num_speculative_tokens": 3,
    }
    first, second = check_passes(
        model, num_gpu_blocks_override=240, max_model_len=160, speculative_config=draft
    )
    assert second["vllm:prefix_cache_hits"] > first["vllm:prefix_cache_hits"]
    drafted, accepted = (
        second[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted")
    )
    assert 0 < accepted < drafted


@families()
@pytest.mark.parametrize("chunk", [7, 512])
def test_chunks(folders, name, chunk):
    """Steps overlap, as by default; prompts are computed whole or in chunks of any length."""
    (after,) = check_passes(
        folders[name], passes=1, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 32), count=12
    )
    assert after["vllm:prefix_cache_hits"] > 0 or chunk == 512


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_of_single_tokens(folders, name):
    check_passes(folders[name], passes=1, max_num_batched_tokens=1, max_num_seqs=1, count=3)


@pytest.mark.more
@pytest.mark.parametrize("name", ["falcon_h1", pytest.param("jamba", marks=pytest.mark.slow)])
def test_without_prefix_caching(folders, name):
    (after,) = check_passes(folders[name], passes=1, enable_prefix_caching=False)
    assert after["vllm:prefix_cache_hits"] == 0


@pytest.mark.more
@pytest.mark.parametrize("elements", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_states_are_whole_in_a_pool_of_codes(folders, elements):
    """Codes change K and V slightly but no states, so any chunks give the same tokens."""
    prompts, texts = prompts_of(8), []
    for chunk in (16, 512):
        with hybrid_engine(
            folders["falcon_h1"],
            kv_cache_dtype=elements,
            max_num_batched_tokens=chunk,
        ) as llm:
            texts.append(generate(llm, prompts, greedy_ids()))
            again = generate(llm, prompts, greedy_ids())
            assert counters(llm)["vllm:prefix_cache_hits"] > 0
        assert again == texts[-1]
    same = sum(one == other for one, other in zip(*texts, strict=True))
    assert same >= len(prompts) - 1


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "block_size"),
    [
        ("qwen3_next, large states", None),
        pytest.param("mamba2", None, marks=pytest.mark.slow),
        pytest.param("qwen3_next, large states", 32, marks=pytest.mark.slow),
        pytest.param("lfm2", None, marks=pytest.mark.slow),
    ],
)
def test_sleep_gives_states_back(folders, name, block_size):
    dense, prompts = Dense(folders[name]), prompts_of(4)
    options = {"enable_sleep_mode": True, "block_size": block_size}
    with hybrid_engine(folders[name], **options) as llm:
        for _ in range(2):
            for prompt, tokens in zip(prompts, generate(llm, prompts, greedy_ids()), strict=True):
                dense.check(prompt, tokens)
            llm.sleep()
            llm.wake_up()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(21))
def test_random_traffic(folders, seed):
    """Sends 100 seeded requests in waves that continue texts of earlier waves."""
    rng = np.random.default_rng(seed)
    name = list(FAMILIES)[seed % len(FAMILIES)]
    dense, texts = Dense(folders[name]), [rng.integers(3, VOCAB, 60).tolist()]
    options = {
        "max_num_batched_tokens": int(rng.choice([24, 48, 100, 256])) + 64,
        "max_num_seqs": int(rng.choice([1, 4, 8, 16])),
        "num_gpu_blocks_override": int(rng.choice([40, 60, 100, 400])),
        "async_scheduling": bool(rng.random() < 0.6),
        "speculative_config": NGRAM if rng.random() < 0.7 else None,
        "additional_config": {"fixed_draft_length": bool(rng.random() < 0.5)},
    }
    with hybrid_engine(folders[name], **options) as llm:
        free = free_blocks(llm)
        for _ in range(4):
            prompts, lengths = [], []
            for _ in range(25):
                text = texts[int(rng.integers(len(texts)))]
                shared = text[: int(rng.integers(0, min(len(text), 180) + 1))]
                own = rng.integers(3, int(rng.choice([6, VOCAB])), int(rng.integers(1, 30)))
                prompts.append([*shared, *own.tolist()])
                lengths.append(int(rng.integers(1, 40)))
            params = [greedy(length, detokenize=False) for length in lengths]
            for prompt, length, tokens in zip(
                prompts, lengths, generate(llm, prompts, params), strict=True
            ):
                assert len(tokens) == length
                dense.check(prompt, tokens)
                texts.append([*prompt, *tokens])
        run_out(llm)
        assert free_blocks(llm) == free, "blocks were never freed"
        print(name, {k: v for k, v in counters(llm).items() if v and k in TOLD})


MEMORY = "deepseek_v41, n-gram memory"


def disk_options(folder):
    return {"additional_config": {"prefix_cache_dir": str(folder), "fixed_draft_length": True}}


@pytest.mark.more
@pytest.mark.parametrize(
    "name",
    [
        *("glm_moe_dsa", "minimax_m3_vl", "glm5_next", "deepseek_v4", "deepseek_v41", "qwen4_exp"),
        pytest.param("hy_v4", marks=pytest.mark.slow),
        pytest.param(MEMORY, marks=pytest.mark.slow),
    ],
)
def test_index_keys_leave_the_pool_with_the_latents_or_kv(name, tmp_path):
    """They return from a disk and reach an engine that decodes for another."""
    drawn = further.FAMILIES | of_mlx_vlm.FAMILIES
    if name == MEMORY:
        model = write_with_memory(tmp_path / "model")
    elif name in drawn:
        model = write_model(drawn[name], tmp_path / "model", drawn=True)
    else:
        model = published.write(published.make(published.FAMILIES[name]), tmp_path / "model")
    dense, prompts = Dense(model), prompts_of(8)
    for start in range(2):
        with hybrid_engine(model, **disk_options(tmp_path / "disk")) as llm:
            for prompt, tokens in zip(prompts, generate(llm, prompts, greedy_ids()), strict=True):
                dense.check(prompt, tokens)
            run_out(llm)
            assert (counters(llm).get(HITS, 0) > 0) == (start == 1)
    prefill_and_decode(model, block_size=None)


@families()
def test_a_restart_finds_states_on_disk(folders, name, tmp_path):
    dense, prompts = Dense(folders[name]), prompts_of(8)
    for start in range(2):
        with hybrid_engine(
            folders[name], speculative_config=NGRAM, **disk_options(tmp_path / "disk")
        ) as llm:
            for prompt, tokens in zip(prompts, generate(llm, prompts, greedy_ids()), strict=True):
                dense.check(prompt, tokens)
            run_out(llm)
            assert (counters(llm).get(HITS, 0) > 0) == (start == 1)


@families(more=KINDS[:1])
def test_one_engine_prefills_and_another_decodes(folders, name):
    prefill_and_decode(folders[name], block_size=32 if name == "mamba2" else None)


def prefill_and_decode(model, block_size):
    """Makes an engine pull another one's K/V, and checks its texts."""
    dense, prompts = Dense(model), prompts_of(6)
    port, pulled = free_port(), 0
    options = {
        "skip_tokenizer_init": True,
        "speculative_config": NGRAM,
        "additional_config": {"fixed_draft_length": True},
        "block_size": block_size,
    }
    with producer(model, port, **options) as p, consumer(model, port, **options) as d:
        for prompt in prompts:
            found = decode(d, prompt, prefill(p, prompt))
            dense.check(prompt, found.tokens)
            pulled += found.pulled
    assert pulled > 0


def fail_next_step(worker):
    """Makes the engine's next step raise, in any process."""
    forward = ModelExecutor.forward_hidden

    def failing(*arguments):
        ModelExecutor.forward_hidden = forward
        raise RuntimeError("no device")

    ModelExecutor.forward_hidden = failing


@pytest.fixture
def spawned(monkeypatch):
    """Gives engines spawned processes, which inherit nothing."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


@pytest.mark.usefixtures("spawned")
@families()
@pytest.mark.parametrize("block_size", [None, 32])
def test_an_engine_in_its_own_process(folders, name, block_size, tmp_path):
    """vLLM completes its configuration again after the pool is allocated."""
    dense, prompts = Dense(folders[name]), prompts_of(8)
    with hybrid_engine(
        folders[name],
        block_size=block_size,
        enable_sleep_mode=True,
        speculative_config=NGRAM,
        **disk_options(tmp_path / "disk"),
    ) as llm:

        def check():
            for prompt, tokens in zip(prompts, generate(llm, prompts, greedy_ids()), strict=True):
                dense.check(prompt, tokens)

        check()
        llm.sleep()
        llm.wake_up()
        check()
        llm.collective_rpc(fail_next_step)
        (failed,) = llm.generate({"prompt_token_ids": [3, 4, 5]}, greedy_ids(), use_tqdm=False)
        assert failed.outputs[0].finish_reason == "error"
        check()
        if name != "mamba2" or block_size:  # whose blocks are longer than these texts
            assert counters(llm)[HITS] > 0  # the disk has what the pool has lost


@pytest.mark.slow
@pytest.mark.usefixtures("spawned")
@pytest.mark.parametrize("block_size", [32, None])
@pytest.mark.parametrize("name", ["qwen3_next, large states", "lfm2", "jamba", "mamba2"])
def test_engines_in_processes_of_their_own_prefill_and_decode(folders, name, block_size):
    prefill_and_decode(folders[name], block_size or (32 if name == "mamba2" else None))


#: Families that mlx-lm divides by heads: one with states, two whose index keys each rank has. Of
#: MiniMax M3's indexer, a rank has the heads that choose for its K/V heads.
BY_HEADS = {"qwen3_5_text": {"num_key_value_heads": 2}, "deepseek_v32": {}, "minimax_m3_vl": {}}
V41 = "deepseek_v41"  # another one, with n-gram memory, without a class of transformers


@pytest.mark.usefixtures("spawned")
@pytest.mark.parametrize("block_size", [None, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen3_5_text", marks=pytest.mark.more),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("deepseek_v32", "minimax_m3_vl", V41, "falcon_h1", "qwen3_next", "lfm2")
        ),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("jamba", "mamba2", "recurrent_gemma")
        ),
    ],
)
def test_ranks_of_an_engine_in_its_own_process(folders, name, block_size, tmp_path):
    """Workers keep states at block ends, where the engine process must end chunks."""
    shape, model = {"pipeline_parallel_size": 2}, folders.get(name)
    if name in BY_HEADS:
        changes = BY_HEADS[name] | {"vocab_size": VOCAB}
        made = published.make(published.FAMILIES[name], **changes)
        shape, model = {"tensor_parallel_size": 2}, published.write(made, tmp_path / "model")
    if name == V41:
        shape, model = {"tensor_parallel_size": 2}, write_with_memory(tmp_path / "model")
    dense, prompts = Dense(model), prompts_of(8)
    with hybrid_engine(model, block_size=block_size, **shape) as llm:
        for _ in range(2):
            for prompt, tokens in zip(prompts, generate(llm, prompts, greedy_ids()), strict=True):
                dense.check(prompt, tokens)
        if name != "mamba2" or block_size:  # whose blocks are longer than these texts
            assert counters(llm)["vllm:prefix_cache_hits"] > 0
