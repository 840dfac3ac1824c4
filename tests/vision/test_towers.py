# SPDX-License-Identifier: Apache-2.0
"""Prompts with images, in any chunks and beside others, equal transformers' same model."""

import numpy as np
import pytest
from vision.by_hand import BLOCK
from vision.toys import Prompt, Toy

from vllm_metal.batch.columns import RequestsRefused

FAMILIES = ("gemma3", "mistral3", "qwen3_vl", "qwen3_5")


@pytest.fixture(scope="module", params=FAMILIES)
def toy(request, tmp_path_factory):
    return Toy(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def served(toy):
    return toy.served()


@pytest.fixture(scope="module")
def two(toy):
    """A text with two images of different shapes."""
    prompt = Prompt().say(*toy.words(5)).show(toy.picture(2, 5), "first")
    return prompt.say(*toy.words(7)).show(toy.picture(4, 2), "second").say(*toy.words(6))


def check(logits, expected):
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(logits, expected, atol=2e-4)


def test_logits_equal_those_of_transformers_wherever_chunks_end(toy, served, two):
    expected = toy.logits(two)
    check(served.step({"a": len(two.ids)}, [served.new("a", two.ids, two.features)])["a"], expected)
    ends = [toy.end(two, wished) for wished in (8, 22, 25, len(two.ids))]
    parts = [served.step({"b": ends[0]}, [served.new("b", two.ids, two.features)])["b"]]
    parts += [served.step({"b": count})["b"] for count in np.diff(ends).tolist()]
    check(np.concatenate(parts), expected)
    assert toy.encoder.num_encoded == 2  # in one request, in two, in any number of chunks


def test_images_and_texts_of_many_requests_share_a_step(toy, served, two):
    text = Prompt().say(*toy.words(20))
    one = Prompt().show(toy.picture(3, 3), "third").say(*toy.words(4))
    prompts = {"a": two, "b": text, "c": one}
    news = [served.new(name, each.ids, each.features) for name, each in prompts.items()]
    first = served.step({"a": toy.end(two, 9), "b": 20, "c": toy.end(one, 5)}, news)
    rest = {name: len(each.ids) - len(first[name]) for name, each in prompts.items()}
    second = served.step({name: count for name, count in rest.items() if count})
    for name, each in prompts.items():
        parts = [first[name], *([second[name]] if name in second else [])]
        check(np.concatenate(parts), toy.logits(each))


def test_what_follows_an_image_is_placed_behind_it_while_it_decodes(toy, served, two):
    count = len(two.ids)
    served.step({"a": count}, [served.new("a", two.ids, two.features)])
    generated = toy.words(5)
    ids = two.ids + generated
    for token in generated:
        served.say("a", token)
    decoded = [served.step({"a": 1})["a"] for _ in range(3)]
    decoded.append(served.step({"a": 2})["a"])  # as of a draft that was kept
    check(np.concatenate(decoded), toy.logits(two, ids)[count:])


@pytest.mark.parametrize("place", ["behind an image", "inside an image"])
def test_a_prefix_that_was_found_needs_only_the_rest_of_the_images(toy, served, place):
    before = BLOCK - 10 if place == "inside an image" else BLOCK - 17
    prompt = Prompt().say(*toy.words(max(before, 2))).show(toy.picture(2, 7), "wide")
    prompt.say(*toy.words(2 * BLOCK - len(prompt.ids) + 3)).show(toy.picture(2, 2), "small")
    prompt.say(*toy.words(3))
    hit = BLOCK if place == "inside an image" else 2 * BLOCK
    offset, picture, _ = prompt.placed[0]
    assert (hit < offset + len(picture.ids)) == (place == "inside an image")
    served.step({"a": len(prompt.ids)}, [served.new("a", prompt.ids, prompt.features)])
    freed = ["wide", "small"]  # the scheduler needed the room meanwhile
    new = served.new("b", prompt.ids, prompt.features, computed=hit, blocks_of="a")
    logits = served.step({"b": len(prompt.ids) - hit}, [new], free_encoder_mm_hashes=freed)["b"]
    check(logits, toy.logits(prompt)[hit:])
    assert toy.encoder.num_encoded == (4 if place == "inside an image" else 3)


def test_a_request_that_was_preempted_inside_an_image_starts_again(toy, served, two):
    served.step({"a": toy.end(two, 9)}, [served.new("a", two.ids, two.features)])
    other = Prompt().say(*toy.words(6))
    served.step({"b": 6}, [served.new("b", other.ids)], preempted_req_ids={"a"})
    served.computed["a"] = 0
    served.say("b", other.ids[0])
    logits = served.step({"b": 1, "a": len(two.ids)}, resumed=["a"])
    check(logits["a"], toy.logits(two))
    check(logits["b"], toy.logits(other, [*other.ids, other.ids[0]])[-1:])
    assert toy.encoder.num_encoded == 2


def test_an_image_that_cannot_be_computed_fails_its_request_alone(toy, served, two):
    sound = Prompt().show(toy.picture(2, 3), "sound").say(*toy.words(3))
    torn = Prompt().show(toy.picture(3, 2), "torn").say(*toy.words(3))
    prompts = {"a": torn, "b": sound}
    news = [served.new(name, each.ids, each.features) for name, each in prompts.items()]
    pixels = news[0].mm_features[0].data["pixel_values"]
    pixels.data = pixels.data[..., 1:]
    with pytest.raises(RequestsRefused) as refused:
        served.step({name: toy.end(each, 9) for name, each in prompts.items()}, news)
    assert set(refused.value.errors) == {"a"}


def test_an_image_without_its_data_fails_its_request_alone(toy, served, two):
    torn = served.new("a", two.ids, two.features)
    torn.mm_features[1].data = None
    with pytest.raises(RequestsRefused) as refused:
        served.step({"a": len(two.ids), "b": 2}, [torn, served.new("b", toy.words(2))])
    assert set(refused.value.errors) == {"a"}
    assert "the scheduler sent no" in str(refused.value.errors["a"])


def test_an_image_whose_rows_see_each_other_is_never_computed_in_parts(tmp_path):
    toy = Toy("gemma3", tmp_path)
    prompt = Prompt().say(*toy.words(3)).show(toy.picture(4, 4), "first")
    served = toy.served()
    with pytest.raises(RequestsRefused) as refused:
        served.step({"a": 9}, [served.new("a", prompt.ids, prompt.features)])
    assert "--max-num-batched-tokens" in str(refused.value.errors["a"])
