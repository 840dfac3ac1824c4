# SPDX-License-Identifier: Apache-2.0
"""Reports of prompts that go to an engine."""

from types import SimpleNamespace

from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_metal.patches.vllm_patches import prompts


class Recorder:
    def __init__(self):
        self.tokens = []

    def on_prompt(self, tokens, salt, messages, tools):
        self.tokens.append(list(tokens))


def told(*given):
    """Tokens of prompts that a watcher gets, without answers."""
    engine, recorder = SimpleNamespace(), Recorder()
    prompts.watch(engine, recorder)
    for prompt in given:
        AsyncLLM.generate(engine, prompt, None, "a")
    return recorder.tokens


def with_images(tokens, *images):
    """Makes images by the first of three tokens, with their hashes."""
    return {
        "type": "multimodal",
        "prompt_token_ids": tokens,
        "mm_placeholders": {"image": [PlaceholderRange(offset=at, length=3) for at, _ in images]},
        "mm_hashes": {"image": [name for _, name in images]},
    }


def test_prompts_of_text_are_told_as_they_are():
    assert told({"prompt_token_ids": [1, 2, 3]}) == [[1, 2, 3]]


def test_images_are_told_apart_where_their_tokens_are_the_same():
    tokens = [1, 9, 9, 9, 2, 9, 9, 9, 3]
    first, same, other, swapped = told(
        with_images(tokens, (1, "a"), (5, "b")),
        with_images(tokens, (1, "a"), (5, "b")),
        with_images(tokens, (1, "a"), (5, "c")),
        with_images(tokens, (1, "b"), (5, "a")),
    )
    assert first == same
    assert first[:5] == other[:5]
    assert not set(first[5:8]) & set(other[5:8])
    assert not set(first[1:4]) & set(swapped[1:4])
    of_text = [first[place] for place in (0, 4, 8)]
    assert of_text == [1, 2, 3]
    assert all(prompts.IMAGES <= first[place] < 2**32 for place in (1, 2, 3, 5, 6, 7))
    assert tokens == [1, 9, 9, 9, 2, 9, 9, 9, 3]
