# SPDX-License-Identifier: Apache-2.0
"""Adapters in an engine: each row uses its own, and no K/V of another."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from e2e.harness import counters, engine, greedy
from engine.lora.toys import VOCAB, Toy, greedy_tokens
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from vllm_metal.engine.models.parts import ModelParts

NUM_TOKENS, NUM_ADAPTERS = 8, 8
SMALL = {
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 16 << 20,
    "skip_tokenizer_init": True,
    "enable_lora": True,
    "max_lora_rank": 8,
}


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    made = Toy("llama", tmp_path_factory.mktemp("llama"))
    made.save()
    return made


@pytest.fixture(scope="module")
def adapters(toy, tmp_path_factory):
    """Folders of adapters with two ranks, and PEFT's models with them."""
    folder = tmp_path_factory.mktemp("adapters")
    return [
        (folder / str(n), toy.adapter(folder / str(n), n, r=4 + 4 * (n % 2), use_rslora=n == 3))
        for n in range(1, NUM_ADAPTERS + 1)
    ]


@pytest.fixture(scope="module")
def llm(toy):
    with engine(str(toy.folder), max_loras=NUM_ADAPTERS, max_cpu_loras=16, **SMALL) as started:
        yield started


def named(number, folder, **options):
    return LoRARequest(f"adapter-{number}", number, str(folder), **options)


def ask(llm, prompts, requests, count=NUM_TOKENS):
    """Returns outputs of each prompt with its adapter."""
    return llm.generate(
        [{"prompt_token_ids": each} for each in prompts],
        greedy(count),
        use_tqdm=False,
        lora_request=requests,
    )


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_adapters_and_none_in_one_batch_are_what_peft_computes(llm, toy, adapters, monkeypatch):
    prompts = [prompt(5 + 9 * n, n) for n in range(NUM_ADAPTERS + 1)]
    requests = [named(n, folder) for n, (folder, _) in enumerate(adapters, 1)] + [None]
    models = [adapted for _, adapted in adapters] + [toy.model]
    expected = [
        greedy_tokens(model, each, NUM_TOKENS) for model, each in zip(models, prompts, strict=True)
    ]
    before = llm.llm_engine.list_loras()  # of other tests
    assert tokens(ask(llm, prompts, requests)) == expected
    llm.reset_prefix_cache()
    built, build = [], ModelParts.forward_hidden
    monkeypatch.setattr(
        ModelParts, "forward_hidden", lambda *given: built.append(1) or build(*given)
    )
    for each, request, wanted in zip(prompts[::4], requests[::4], expected[::4], strict=True):
        built.clear()
        assert tokens(ask(llm, [each], [request])) == [wanted]
        assert len(built) < NUM_TOKENS  # others by graphs
    assert llm.llm_engine.list_loras() == before | set(range(1, NUM_ADAPTERS + 1))


def test_prefixes_are_found_by_the_same_adapter_only(llm, adapters):
    text = prompt(80, 91)
    first, second = (named(n, adapters[n - 1][0]) for n in (1, 2))
    found = [ask(llm, [text], [each], 1)[0] for each in (first, second, None, first, None)]
    assert [output.num_cached_tokens for output in found] == [0, 0, 0, 64, 64]


@pytest.mark.parametrize("way", ["in place", "unloaded"])
def test_an_adapter_trained_anew_under_its_path_finds_no_old_kv(llm, toy, adapters, tmp_path, way):
    number = 20 + (way == "unloaded")
    text = prompt(80, number)
    path = tmp_path / "adapter"
    shutil.copytree(adapters[0][0], path)
    old = tokens(ask(llm, [text], [named(number, path)]))
    shutil.rmtree(path)
    anew = toy.adapter(path, 77)
    request = named(number, path, load_inplace=way == "in place")
    if way == "unloaded":
        assert tokens(ask(llm, [text], [request])) == old  # until it is let go of
        assert llm.llm_engine.remove_lora(number)
    output = ask(llm, [text], [request])[0]
    assert output.num_cached_tokens == 0
    assert tokens([output]) == [greedy_tokens(anew, text, NUM_TOKENS)] != old
    assert ask(llm, [text], [request], 1)[0].num_cached_tokens == 64


def test_a_request_whose_adapter_cannot_be_read_fails_alone(llm, toy, adapters, tmp_path):
    shutil.copytree(adapters[0][0], tmp_path / "broken")
    file = tmp_path / "broken" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    text = prompt(20, 93)
    with pytest.raises(ValueError, match="'adapter-30' has an unreadable adapter_model"):
        llm.llm_engine.add_lora(named(30, tmp_path / "broken"))
    bad, good = ask(llm, [text, text], [named(30, tmp_path / "broken"), named(1, adapters[0][0])])
    assert bad.outputs[0].finish_reason == "error"
    assert tokens([good]) == [greedy_tokens(adapters[0][1], text, NUM_TOKENS)]


def test_an_adapter_of_another_models_shape_is_refused(llm, toy, tmp_path):
    """The error names the adapter, the module and both shapes."""
    settings = {"target_modules": ["down_proj"], "layers_to_transform": [1]}
    toy.adapter(tmp_path / "wide", 1, **settings)
    file = tmp_path / "wide" / "adapter_model.safetensors"
    longer = {
        name: torch.cat([array, array[:, :32]], 1) if ".lora_A." in name else array
        for name, array in load_file(file).items()
    }
    save_file(longer, file)
    shapes = re.escape("shapes (4, 128) and (64, 4) at model.layers.1.mlp.down_proj")
    with pytest.raises(ValueError, match=rf"'adapter-31' has {shapes}, .* is \[64, 96\]"):
        llm.llm_engine.add_lora(named(31, tmp_path / "wide"))
    assert 31 not in llm.llm_engine.list_loras()
    text = prompt(20, 96)
    (bad,) = ask(llm, [text], [named(31, tmp_path / "wide")])
    assert bad.outputs[0].finish_reason == "error"


@pytest.mark.more
def test_drafts_are_lossless_and_more_adapters_than_slots_take_turns(toy, adapters):
    text = prompt(12, 94) * 4
    models = [(named(n, folder), adapted) for n, (folder, adapted) in enumerate(adapters[:4], 1)]
    models.append((None, toy.model))
    expected = [greedy_tokens(model, text, 40) for _, model in models]
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with engine(str(toy.folder), max_loras=2, speculative_config=speculation, **SMALL) as drafting:
        outputs = ask(drafting, [text] * len(models), [each for each, _ in models], 40)
        assert tokens(outputs) == expected
        found = counters(drafting)
        assert found["vllm:spec_decode_num_accepted_tokens"] > 0
        first, second, *_ = drafting.llm_engine.list_loras()
        assert drafting.llm_engine.pin_lora(first)
        with pytest.raises(ValueError, match="must remain for other adapters"):
            drafting.llm_engine.pin_lora(second)
        # Those that take turns leave the pinned one where it is.
        rest = (5, 6, 7)
        ask(drafting, [text] * 3, [named(n, adapters[n - 1][0]) for n in rest], 1)
        assert first in drafting.llm_engine.list_loras()


def test_the_configuration_of_an_adapter_counts(llm, toy, adapters, tmp_path):
    """Twice the alpha is another adapter, although its arrays are equal."""
    shutil.copytree(adapters[0][0], tmp_path / "louder")
    config = tmp_path / "louder" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 64}))
    text = prompt(40, 95)
    quiet, loud = ask(llm, [text] * 2, [named(1, adapters[0][0]), named(40, tmp_path / "louder")])
    assert tokens([quiet]) == [greedy_tokens(adapters[0][1], text, NUM_TOKENS)]
    assert tokens([loud]) != tokens([quiet])
