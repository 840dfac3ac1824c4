# SPDX-License-Identifier: Apache-2.0
"""Engines with per-layer embeddings on disk generate the same text."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from e2e.harness import counters, engine, greedy, run_out
from e2e.harness import generate as generated
from engine.models import further, of_mlx_vlm, recurrent
from engine.models.published import FAMILIES, VOCAB, make, write
from engine.models.v41_formulas import write_with_memory
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding
from vllm import SamplingParams

from vllm_metal.engine.models.table_rows import TableRows
from vllm_metal.engine.weights import disk_tables, table_reader
from vllm_metal.engine.worker.model_runner import ModelRunner

LAYERS, PER_LAYER = 6, 10  # of the small Gemma 4
ROW_BYTES = LAYERS * PER_LAYER * 4  # in float32
READ = "vllm:metal_table_read_bytes"
#: One head of a size that the kernels serve.
FOR_KERNELS = {"head_dim": 64, "global_head_dim": 64, "hidden_size": 64} | {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = make(FAMILIES["gemma4_text"], **FOR_KERNELS)
    return write(model, tmp_path_factory.mktemp("tables") / "model")


@pytest.fixture(scope="module")
def ngrams(tmp_path_factory):
    """Its tables are called with hashes of two and three tokens."""
    family = further.FAMILIES["longcat_flash_ngram"]
    return recurrent.write_model(family, tmp_path_factory.mktemp("ngrams") / "model", drawn=True)


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """Two of its layers have a table each, of which they choose rows by n-grams."""
    text = FAMILIES["qwen4_exp"].config["text_config"] | {"head_dim": 64, "indexer_head_dim": 64}
    model = make(FAMILIES["qwen4_exp"], text_config=text)
    return write(model, tmp_path_factory.mktemp("layers") / "model")


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    """Two of its layers read rows of a table each before they attend."""
    sizes = {"head_dim": 64, "index_head_dim": 64}
    return write_with_memory(tmp_path_factory.mktemp("memory") / "model", **sizes)


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """Its table has values of attention."""
    family = of_mlx_vlm.FAMILIES["limite"]
    return recurrent.write_model(family, tmp_path_factory.mktemp("values") / "model", drawn=True)


def start(folder, place="disk", **options):
    settings = {"skip_tokenizer_init": True, "max_model_len": 80, "dtype": "float32"}
    settings |= {"max_num_batched_tokens": 32, "num_gpu_blocks_override": 40}
    settings |= {"additional_config": {"embedding_tables": place, "fixed_draft_length": True}}
    return engine(folder, **settings | options)


def prompts(*lengths, vocabulary=VOCAB):
    return [[(7 * i * i + 3 * n + i // 5) % vocabulary for i in range(n)] for n in lengths]


def params(seeds, count=16):
    told = {"max_tokens": count, "ignore_eos": True, "detokenize": False}
    return [
        SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed, **told)
        for seed in seeds
    ]


@pytest.fixture
def late(monkeypatch):
    """Records whether each step read rows at submission, for tokens of the previous step."""
    counted, submitting = [], []
    of_runner, of_rows = ModelRunner.read_tables, TableRows.read

    def read_tables(self):
        submitting.append(True)
        of_runner(self)
        submitting.clear()

    def read(self):
        if submitting:
            counted.append(self.are_due)
        of_rows(self)

    monkeypatch.setattr(ModelRunner, "read_tables", read_tables)
    monkeypatch.setattr(TableRows, "read", read)
    return counted


@pytest.mark.parametrize(
    ("model", "kernels", "drafts"),
    [
        ("folder", "mlx", None),
        pytest.param("folder", "mlx", "ngram", marks=pytest.mark.more),
        pytest.param("folder", "mlx", "draft_model", marks=pytest.mark.more),
        pytest.param("folder", "interpret", None, marks=pytest.mark.more),
        pytest.param("folder", "interpret", "draft_model", marks=pytest.mark.slow),
        pytest.param("ngrams", "mlx", None, marks=pytest.mark.more),
        pytest.param("ngrams", "mlx", "ngram", marks=pytest.mark.more),
        pytest.param("layers", "mlx", None, marks=pytest.mark.more),
        pytest.param("layers", "mlx", "ngram", marks=pytest.mark.more),
        pytest.param("layers", "interpret", "ngram", marks=pytest.mark.slow),
        pytest.param("memory", "mlx", None, marks=pytest.mark.more),
        pytest.param("memory", "mlx", "ngram", marks=pytest.mark.more),
        pytest.param("memory", "interpret", "ngram", marks=pytest.mark.slow),
        pytest.param("values", "mlx", None, marks=pytest.mark.more),
    ],
)
def test_tokens_are_those_of_a_loaded_table(model, late, monkeypatch, kernels, drafts, request):
    """Chunks, greedy and seeded requests in one batch, and a hit."""
    folder = request.getfixturevalue(model)
    monkeypatch.setenv("VLLM_METAL_KERNELS", kernels)
    vocabulary = recurrent.VOCAB if model in ("ngrams", "memory", "values") else VOCAB
    asked, found, hits = prompts(5, 33, 50, vocabulary=vocabulary), {}, {}
    speculation = None
    if drafts is not None:
        speculation = {"method": drafts, "num_speculative_tokens": 3} | (
            {"model": folder}
            if drafts == "draft_model"
            else {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
        )
    for place in ("memory", "disk"):
        # Layers of a model with n-gram memory form five groups, each with blocks of its own.
        blocks = {"num_gpu_blocks_override": 80}
        with start(folder, place, speculative_config=speculation, **blocks) as llm:
            found[place] = [
                [list(output.outputs[0].token_ids) for output in outputs]
                for outputs in (
                    llm.generate(
                        [{"prompt_token_ids": prompt} for prompt in asked],
                        params((None, 1, 2)),
                        use_tqdm=False,
                    )
                    for _ in range(2)
                )
            ]
            counted = counters(llm)
            hits[place] = counted["vllm:prefix_cache_hits"]
            assert (counted[READ] > 0) == (place == "disk")
            if drafts:
                assert counted["vllm:spec_decode_num_draft_tokens"] > 0
    assert found["disk"] == found["memory"] and hits["disk"] == hits["memory"] > 0
    assert len(set(itertools.chain(*found["disk"][0]))) > 8
    # Interpreted kernels run as they are called, and MLX's scatter waits where there are drafts.
    assert any(late) == (kernels == "mlx" and drafts is None)


def test_a_step_reads_the_rows_of_its_tokens_and_no_others(folder, monkeypatch):
    """With a cache of one row, each token reads a row unless it was the last one."""
    monkeypatch.setattr(table_reader.TableReader.__init__, "__defaults__", (ROW_BYTES,))
    (prompt,) = prompts(20)
    with start(folder) as llm:
        before = counters(llm)[READ]
        (tokens,) = generated(llm, [prompt], greedy(10, detokenize=False))
        run_out(llm)
        nbytes = counters(llm)[READ] - before
    # The prompt's ids in order; then each token but the newest, which no step has read.
    read = [*np.unique(prompt).tolist(), *tokens[:-1]]
    expected = sum(now != last for last, now in itertools.pairwise(read)) + 1
    # The warm-up may have left the first; with async scheduling one more step may have begun.
    assert nbytes / ROW_BYTES in (expected - 1, expected, expected + 1)


@pytest.mark.more
def test_a_step_reads_the_rows_that_its_ngrams_choose(tmp_path, monkeypatch):
    """With room for one row, all of a step's rows are read; transformers' model chooses them."""
    model, steps = make(FAMILIES["qwen4_exp"]), []
    folder, (prompt,) = write(model, tmp_path / "model"), prompts(20)
    monkeypatch.setattr(disk_tables, "CACHE_BYTES", 1)
    with start(folder) as llm:
        before = counters(llm)[READ]
        (tokens,) = generated(llm, [prompt], greedy(10, detokenize=False))
        run_out(llm)
        nbytes = counters(llm)[READ] - before
    for _, module in model.named_modules():
        if isinstance(module, Qwen4ExpTextNGramEmbedding):
            of_table = module.ngram_embedding
            of_table.register_forward_pre_hook(lambda _, args: steps.append(args[0][0].numpy()))
            row_bytes = of_table.weight[0].nbytes
    with torch.no_grad():
        model(torch.tensor([[*prompt, *tokens[:-1]]]))
    expected = 0
    for ids in steps:  # [T, heads] of each table
        rows = [np.unique(part) for part in (ids[:20], *ids[20:])]
        last = [-1, *(row[-1] for row in rows)]
        expected += sum(len(row) - (row[0] == end) for row, end in zip(rows, last, strict=False))
    assert len(steps) == 2 and expected > 2 * (40 + 9 * 6)
    # With async scheduling one more step may have begun.
    assert nbytes / row_bytes in range(expected, expected + 2 * ids.shape[1] + 1)


def test_a_file_that_is_cut_off_fails_requests_with_its_name(tmp_path, folder):
    own = tmp_path / "own"
    own.mkdir()
    for path in Path(folder).iterdir():
        (own / path.name).write_bytes(path.read_bytes())
    weights = own / "model.safetensors"
    content, asked = weights.read_bytes(), prompts(20, 9)
    with start(str(own), enable_sleep_mode=True) as llm:
        sure = generated(llm, asked, greedy(4, detokenize=False))
        llm.sleep(2)
        llm.wake_up()  # with files opened anew, and no row cached but those of a check
        assert generated(llm, asked[:1], greedy(4, detokenize=False)) == sure[:1]
        with weights.open("r+b") as file:
            file.truncate(1000)
        unread = [token for token in range(VOCAB) if token not in (*asked[0], *sure[0])]
        (output,) = llm.generate(
            [{"prompt_token_ids": unread}], greedy(4, detokenize=False), use_tqdm=False
        )
        completion = output.outputs[0]
        assert completion.finish_reason == "error"
        assert "model.safetensors: the file was cut off. Restore" in completion.stop_reason
        weights.write_bytes(content)
        assert generated(llm, asked, greedy(4, detokenize=False)) == sure


def test_rows_that_are_used_before_they_are_read_are_no_numbers(folder, monkeypatch):
    """Rows that are not read yet are NaN, so no request gets other tokens' rows."""
    with start(folder, async_scheduling=True) as llm:
        monkeypatch.setattr(TableRows, "read", lambda self: None)
        (output,) = llm.generate(
            [{"prompt_token_ids": prompts(20)[0]}], greedy(4, detokenize=False), use_tqdm=False
        )
        assert output.outputs[0].finish_reason == "error"
