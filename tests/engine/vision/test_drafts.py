# SPDX-License-Identifier: Apache-2.0
"""Draft networks beside images keep tokens, and agree with outside references."""

import json
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from e2e.drafting import draft_counts, transfer, watching
from e2e.harness import counters, run_out
from e2e.test_lora import named
from e2e.test_lora_images import TEXT, adapted
from engine.models.cases import cases
from engine.spec_decode import assistants
from engine.spec_decode.heads import CONFIG, TIE, random_arrays, write_head, write_target
from engine.spec_decode.image_drafts import (
    CASES,
    GUESSABLE,
    Drafting,
    Target,
    write,
    write_guessable,
)
from engine.vision.checkpoints import FAMILIES, HEAD_DIM, HIDDEN
from engine.vision.drafting import (
    CLOSE,
    FEW,
    WIDE,
    WORDS,
    answers,
    asked,
    judge_of,
    noting,
    serving,
)
from vllm import SamplingParams

from vllm_metal.engine.spec_decode.block_attention import BlockAttention
from vllm_metal.engine.spec_decode.head_images import HeadImages
from vllm_metal.engine.spec_decode.paged_head import HeadNetwork, HeadPasses
from vllm_metal.engine.worker.model_runner import ModelRunner
from vllm_metal.identity.model_files import ModelLoadError

VOCAB = 264  # of Qwen's toys
KERNELS = ["qwen3_5, mtp", "qwen3_vl, eagle3", "qwen3_vl, dflash"]

#: Blocks of a pool that is too small for all requests at once.
FEW_BLOCKS = {"mtp": 17, "eagle3": 17, "dflash": 24}
FEW_BY_FAMILY = {"qwen3_vl": 20, "inkling_mm_model": 88}


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("case", cases(CASES, ["qwen3_5, mtp"], ["qwen3_vl, eagle3"]))
def test_tokens_stay_and_drafts_are_those_of_an_outside_reference(case, tmp_path, monkeypatch):
    """Has chunks that end within images, prefix hits and preemption; text beside images."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    drafting = write(tmp_path, case)
    prompts = asked(drafting.family)
    with serving(drafting, speculates=False) as llm:
        expected, _ = answers(llm, prompts)
    family, method = CASES[case]
    few = FEW_BY_FAMILY.get(family, FEW_BLOCKS[method])
    with noting() as noted, serving(drafting, num_gpu_blocks_override=few) as llm:
        noted.drafts, noted.rows = [], []  # not of what the engine tries as it starts
        assert answers(llm, prompts)[0] == expected
        again, cached = answers(llm, prompts[:2])
        seen, (num_drafts, num_accepted) = counters(llm), draft_counts(llm)
    assert again == [*expected[:2], *expected[3:5]]
    assert seen["vllm:num_preemptions"] > 0
    assert sum(cached) > 0
    assert 0 < num_accepted < num_drafts
    gap, error = noted.check(judge_of(drafting, prompts))
    assert gap <= TIE and error <= CLOSE
    assert "dflash" in case or noted.num_ahead > 0
    assert "dflash" in case or "several" in case or len(noted.rows) > 50


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("case", cases(GUESSABLE, ["qwen3_5, mtp"], ["qwen3_vl, eagle"]))
def test_as_many_drafts_are_accepted_after_an_image_as_without_it(case, tmp_path, monkeypatch):
    """The newest token determines the target's next one, and the head drafts from it alone."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    drafting = write_guessable(tmp_path, case)
    words, params = WORDS * 2, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    image = {"image": WIDE}
    shown = {"prompt": f"{drafting.family.image} {words}", "multi_modal_data": image}
    found, accepted = [], []
    for speculates in (False, True):
        with serving(drafting, speculates) as llm:
            for prompt in (shown, {"prompt": words}):
                before = draft_counts(llm)
                (output,) = llm.generate([prompt], params, use_tqdm=False)
                run_out(llm)
                found.append(output.outputs[0].token_ids)
                num_drafts, num_accepted = np.subtract(draft_counts(llm), before)
                accepted.append(num_accepted / max(num_drafts, 1))
    assert found[:2] == found[2:]
    *_, after_image, without = accepted
    assert after_image >= 0.8 * without > 0.4


def _as_it_is(self, inputs, rows):
    return inputs


def _placeholders(self, *arguments, **options):
    return None


def _moved(self, rows, rope, cache, positions=None):
    return WRITE(self, rows, rope, cache, None)


WRITE = BlockAttention.write
WRONG = {
    "positions without images": ("qwen3_5, mtp", HeadImages, "placed", _as_it_is),
    "embeddings of placeholders": ("qwen3_5, mtp", HeadImages, "embeddings", _placeholders),
    "a block drafter's by M-RoPE": ("qwen3_vl, dflash", BlockAttention, "write", _moved),
}


@pytest.mark.more
@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("name", WRONG)
def test_drafts_are_others_where_a_head_reads_images_as_text(name, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    case, owner, attribute, wrong = WRONG[name]
    drafting = write(tmp_path, case)
    prompts = asked(drafting.family)[:1]
    monkeypatch.setattr(owner, attribute, wrong)
    with noting() as noted, serving(drafting) as llm:
        noted.drafts, noted.rows = [], []
        answers(llm, prompts)
    gap, error = noted.check(judge_of(drafting, prompts))
    assert gap > 10 * TIE or error > 100 * CLOSE


@pytest.mark.more
@pytest.mark.usefixtures("unfused")
def test_heads_read_hidden_states_of_the_adapted_model(tmp_path, monkeypatch):
    """One batch has requests with and without an adapter."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    drafting = write(tmp_path / "toys", "qwen3_vl, eagle3")
    family, folder = drafting.family, drafting.folder
    model = adapted(family, folder, 1, TEXT, tmp_path / "adapter")
    first, second, third = asked(family)
    targets = [
        Target(family, folder, *first, model),
        Target(family, folder, *second),
        Target(family, folder, *third, model),
    ]
    adapters = [named(1, tmp_path / "adapter"), None, named(1, tmp_path / "adapter")]
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with serving(drafting, speculates=False, **options) as llm:
        expected, _ = answers(llm, [first, second, third], lora_request=adapters * 2)
    with noting() as noted, serving(drafting, **options) as llm:
        noted.drafts, noted.rows = [], []
        found, _ = answers(llm, [first, second, third], lora_request=adapters * 2)
        num_drafts, num_accepted = draft_counts(llm)
    assert found == expected and 0 < num_accepted < num_drafts
    gap, error = noted.check(drafting.judge(targets))
    assert gap <= TIE and error <= CLOSE


@pytest.mark.parametrize("case", cases(KERNELS, more=["qwen3_5, mtp"]))
def test_steps_that_do_not_wait_draft_as_those_that_do(case, tmp_path, monkeypatch):
    """Runs interpreted kernels; only the device knows the positions."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    drafting, found, made = write(tmp_path, case), {}, []
    init = ModelRunner.__init__

    def noting_runner(self, *arguments, **keywords):
        init(self, *arguments, **keywords)
        made.append(self)

    monkeypatch.setattr(ModelRunner, "__init__", noting_runner)
    prompts = asked(drafting.family)[:2]
    for kernels in ("mlx", "interpret"):
        made.clear()
        monkeypatch.setenv("VLLM_METAL_KERNELS", kernels)
        with watching(monkeypatch) as drafted, serving(drafting, max_num_batched_tokens=64) as llm:
            drafted.take()
            found[kernels] = answers(llm, prompts), draft_counts(llm), drafted.take()
        assert (made[0].num_waits == 0) == (kernels == "interpret")
    assert found["mlx"] == found["interpret"]


def _draft_model(folder):
    return write_target(folder, CONFIG | {"vocab_size": VOCAB})


def _medusa(folder):
    shapes = {f"blocks.{head}.layers.0.weight": (HIDDEN, HIDDEN) for head in range(3)}
    shapes |= {f"lm_heads.{head}.weight": (VOCAB, HIDDEN) for head in range(3)}
    config = {"model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB}
    config |= {"num_heads": 3, "num_hidden_layers": 1}
    return write_head(folder, shapes, {}, config, "model.safetensors")


NETWORKS = {"draft_model": _draft_model, "medusa": _medusa}


@pytest.mark.more
@pytest.mark.parametrize("method", NETWORKS)
def test_networks_that_read_no_image(method, tmp_path, monkeypatch):
    """A draft model drafts for texts alone; Medusa's heads also read images' hidden states."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    toy = write(tmp_path / "toys", "qwen3_vl, dflash")
    folder = NETWORKS[method](tmp_path / method)
    speculation = {"method": method, "model": str(folder), "num_speculative_tokens": 3}
    drafting = Drafting(toy.family, toy.folder, speculation)
    prompts = asked(toy.family)
    with serving(drafting, speculates=False) as llm:
        expected, _ = answers(llm, prompts)
    with noting() as noted, serving(drafting) as llm:
        noted.drafts = []
        assert answers(llm, prompts)[0] == expected
        num_drafts, _ = draft_counts(llm)
    assert num_drafts > 0
    text_alone, _ = expected[2]
    with_images = [text for text, _ in noted.drafts if text[: len(text_alone)] != text_alone]
    assert len(noted.drafts) > len(with_images)
    assert (len(with_images) > 0) == (method == "medusa")


@pytest.mark.more
def test_an_assistant_drafts_for_requests_with_images(tmp_path, monkeypatch):
    """Gemma 4's assistant also reads K/V of the images' tokens."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    family = FAMILIES["gemma4"]
    family.write(tmp_path / "target", few=True)
    text = json.loads((tmp_path / "target" / "config.json").read_text())["text_config"]
    keys = "head_dim", "num_key_value_heads", "sliding_window", "vocab_size", "rope_parameters"
    layers = assistants.CONFIG["text_config"] | {key: text[key] for key in keys}
    layers |= {"attention_k_eq_v": False, "global_head_dim": 2 * HEAD_DIM}
    config = assistants.CONFIG | {"backbone_hidden_size": HIDDEN, "text_config": layers}
    shapes = assistants.shapes(vocab=text["vocab_size"], size=HEAD_DIM, hidden=HIDDEN)
    ends = "model.embed_tokens.weight"
    embedding = random_arrays({ends: shapes[ends]})[ends]
    embedding[FEW] *= 4  # so that it drafts what random requests may say
    arrays = assistants.SCALARS | {ends: embedding}
    folder = write_head(tmp_path / "assistant", shapes, arrays, config, "model.safetensors")
    speculation = {"method": "mtp", "model": str(folder), "num_speculative_tokens": 3}
    drafting = Drafting(family, tmp_path / "target", speculation)
    prompts, whole = asked(family), {"max_num_batched_tokens": 256}
    with serving(drafting, speculates=False, **whole) as llm:
        expected, _ = answers(llm, prompts)
    with noting() as noted, serving(drafting, **whole) as llm:
        noted.drafts = []
        assert answers(llm, prompts)[0] == expected
        num_drafts, num_accepted = draft_counts(llm)
    assert 0 < num_accepted < num_drafts
    text_alone, _ = expected[2]
    assert any(text[: len(text_alone)] != text_alone for text, _ in noted.drafts)


@pytest.mark.parametrize("case", cases(KERNELS[:2], more=["qwen3_vl, eagle3"]))
def test_an_engine_that_prefills_for_others_reads_what_one_that_drafts_does(
    case, tmp_path, monkeypatch
):
    """Compares embeddings, positions and rotations of a head's rows, by index in the prompts."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    drafting, found = write(tmp_path / "toys", case), {}
    prompts, placed, read = asked(drafting.family)[:2], HeadPasses.placed, {}

    def placing(self, inputs, rows):
        out = placed(self, inputs, rows)
        embeddings = out.embeddings
        if embeddings is None:
            embeddings = self.module.embed_tokens(out.input_ids)
        arrays = embeddings, out.positions, *(array for _, array in out.extras)
        for row, index in enumerate(rows.positions_np.tolist()):
            if rows.stored_np is None or rows.stored_np[row]:
                read[index] = [np.array(array[row]).tolist() for array in arrays]
        return out

    monkeypatch.setattr(HeadPasses, "placed", placing)
    producing = {"kv_transfer_config": transfer(tmp_path / "kept", "kv_producer")}
    for role, options in (("drafts", {}), ("produces", producing)):
        with serving(drafting, **options) as llm:
            for number, prompt in enumerate(prompts):
                read.clear()
                ((ids, _), *_), _ = answers(llm, [prompt])
                found[role, number] = [read[index] for index in range(len(ids) - 1)]
            assert (draft_counts(llm)[0] > 0) == (role == "drafts")
    all_rows = [row for rows in found.values() for row in rows]
    assert {len(row) for row in all_rows} == {2, 3}  # some passes rotate by three positions
    size = next(len(row[2][0]) for row in all_rows if len(row) == 3)
    frequencies = 10000.0 ** (-np.arange(size) / size)
    for number in range(len(prompts)):
        for one, other in zip(found["produces", number], found["drafts", number], strict=True):
            assert one[0] == other[0]
            # Passes without an image rotate by a position; they may end at other rows.
            turns = [
                of[2:] or [[np.cos(a := of[1] * frequencies), np.sin(a)]] for of in (one, other)
            ]
            np.testing.assert_allclose(*turns, atol=1e-5)


def test_a_head_that_embeds_tokens_in_another_width_is_named():
    speculation = SimpleNamespace(model="head", num_speculative_tokens=1)
    model = SimpleNamespace(model="target", get_hidden_size=lambda: 16)
    config = SimpleNamespace(speculative_config=speculation, model_config=model)
    head = SimpleNamespace(embed_tokens=lambda token_ids: mx.zeros((len(token_ids), 8)))
    network = HeadNetwork(config, head, (), None)
    reason = "'head' is not supported with images: its token embeddings have 8 dimensions"
    with pytest.raises(ModelLoadError, match=reason):
        network.read_images(None)
