# SPDX-License-Identifier: Apache-2.0
"""Prompts with images, in any chunks and beside others, equal transformers' same model."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from engine.models.cases import cases
from engine.vision.by_hand import BLOCK
from engine.vision.toys import Prompt, Toy
from mlx.utils import tree_flatten, tree_unflatten

from vllm_metal.engine.batch.per_request_state import RequestsRefused
from vllm_metal.engine.vision.families import FAMILIES as FAMILIES_SERVED
from vllm_metal.engine.vision.images import images_of
from vllm_metal.engine.vision.tower import load_weights
from vllm_metal.identity.model_files import ModelLoadError

pytestmark = pytest.mark.usefixtures("unfused")

FAMILIES = (
    *("gemma3", "gemma4", "inkling_mm_model", "lfm2_vl", "llava", "mistral3"),
    *("qwen3_vl", "qwen3_5"),
)


#: A tower of each family is compared; what is done with its rows differs where those of an image
#: see each other.
EVERY = pytest.mark.parametrize(
    "toy", cases(FAMILIES, ["qwen3_vl"], {*FAMILIES} - {"qwen3_vl"}), indirect=True
)
KINDS = pytest.mark.parametrize(
    "toy", cases(FAMILIES, ["qwen3_vl"], ["gemma3", "inkling_mm_model"]), indirect=True
)


@pytest.fixture(scope="module")
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


@EVERY
def test_logits_equal_those_of_transformers_wherever_chunks_end(toy, served, two):
    expected = toy.logits(two)
    check(served.step({"a": len(two.ids)}, [served.new("a", two.ids, two.features)])["a"], expected)
    ends = sorted({toy.end(two, wished) for wished in (8, 22, 25, len(two.ids))})
    parts = [served.step({"b": ends[0]}, [served.new("b", two.ids, two.features)])["b"]]
    parts += [served.step({"b": count})["b"] for count in np.diff(ends).tolist()]
    check(np.concatenate(parts), expected)
    assert toy.encoder.num_encoded == 2  # in one request, in two, in any number of chunks


@KINDS
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


@KINDS
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


@KINDS
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


@KINDS
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


@KINDS
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


@KINDS
def test_an_image_without_its_data_fails_its_request_alone(toy, served, two):
    torn = served.new("a", two.ids, two.features)
    torn.mm_features[1].data = None
    with pytest.raises(RequestsRefused) as refused:
        served.step({"a": len(two.ids), "b": 2}, [torn, served.new("b", toy.words(2))])
    assert set(refused.value.errors) == {"a"}
    assert "the scheduler sent no" in str(refused.value.errors["a"])


def test_a_window_that_is_less_than_an_image_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"sliding_window=15 .* images of 16 tokens"):
        Toy("gemma3", tmp_path, sliding_window=15).served()


#: Changes of an Inkling's config.json, and what the error names.
INKLING_REFUSED = {
    "another tower": ({"vision_config": {"vision_encoder_type": "linear"}}, "vision_encoder_type"),
    "a key of tomorrow": ({"vision_config": {"num_registers": 4}}, "vision_config.num_registers=4"),
    "another placeholder": ({"image_token_id": 7}, "image_token_id=7"),
}


@pytest.mark.parametrize("name", INKLING_REFUSED)
def test_what_inklings_tower_or_processor_does_not_read_is_named(name):
    changes, reason = INKLING_REFUSED[name]
    config = {"text_config": {"hidden_size": 40}, "vision_config": {}} | changes
    with pytest.raises(ModelLoadError, match=reason):
        FAMILIES_SERVED["inkling_mm_model"].tower(config)


def test_an_image_whose_rows_see_each_other_is_never_computed_in_parts(tmp_path):
    toy = Toy("gemma3", tmp_path)
    prompt = Prompt().say(*toy.words(3)).show(toy.picture(4, 4), "first")
    served = toy.served()
    with pytest.raises(RequestsRefused) as refused:
        served.step({"a": 9}, [served.new("a", prompt.ids, prompt.features)])
    assert "--max-num-batched-tokens" in str(refused.value.errors["a"])


@pytest.mark.more
@pytest.mark.parametrize("name", ["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_frames_of_a_video_are_placed_as_transformers_does(tmp_path, name):
    toy = Toy(name, tmp_path)
    prompt = Prompt(modality="video").say(*toy.words(3)).show(toy.video(3, 2, 4), "video")
    prompt.say(*toy.words(5))
    served = toy.served()
    parts = [served.step({"a": 20}, [served.new("a", prompt.ids, prompt.features)])["a"]]
    parts.append(served.step({"a": len(prompt.ids) - 20})["a"])
    check(np.concatenate(parts), toy.logits(prompt))


def test_a_quantized_tower_computes_what_its_weights_stand_for(tmp_path):
    toy = Toy("qwen3_vl", tmp_path)
    image = images_of(Prompt().show(toy.picture(3, 4), "image").features)[0]
    served_tower = FAMILIES_SERVED["qwen3_vl"].tower
    plain, packed, dense = (served_tower(toy.config.to_dict()) for _ in range(3))
    load_weights(plain, toy.folder, mx.float32, {})
    nn.quantize(plain, 32, 8, class_predicate=quantizable)
    write(tmp_path / "packed", dict(tree_flatten(plain.parameters())))
    load_weights(
        packed, tmp_path / "packed", mx.float32, {"quantization": {"group_size": 32, "bits": 8}}
    )
    found = packed.encode("image", image.data)
    write(tmp_path / "dense", dict(tree_flatten(dequantized(plain).parameters())))
    load_weights(dense, tmp_path / "dense", mx.float32, {})
    expected = dense.encode("image", image.data)
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-4)


def test_weights_that_are_missing_or_have_no_place_are_an_error(tmp_path):
    toy = Toy("qwen3_vl", tmp_path)
    tower = FAMILIES_SERVED["qwen3_vl"].tower(toy.config.to_dict())
    names = dict(tree_flatten(tower.parameters()))
    one = next(iter(names))
    write(tmp_path / "fewer", {name: array for name, array in names.items() if name != one})
    with pytest.raises(ModelLoadError, match=r"Missing 1 parameters"):
        load_weights(tower, tmp_path / "fewer", mx.float32, {})
    write(tmp_path / "more", names | {"vision_tower.another": mx.zeros(1)})
    with pytest.raises(ModelLoadError, match=r"vision_tower\.another"):
        load_weights(tower, tmp_path / "more", mx.float32, {})
    write(tmp_path / "none", {"language_model.norm": mx.zeros(1)})
    with pytest.raises(ModelLoadError, match="no weights of a vision tower"):
        load_weights(tower, tmp_path / "none", mx.float32, {})


def quantizable(path, module):
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def dequantized(module):
    """The module, of dense ones again."""
    dense = {
        path: nn.Linear(1, 1).update({"weight": weight_of(part), "bias": part.bias})
        if isinstance(part, nn.QuantizedLinear)
        else nn.Embedding(1, 1).update({"weight": weight_of(part)})
        for path, part in module.named_modules()
        if isinstance(part, (nn.QuantizedLinear, nn.QuantizedEmbedding))
    }
    module.update_modules(tree_unflatten(list(dense.items())))
    return module


def weight_of(part):
    return mx.dequantize(part.weight, part.scales, part.biases, part.group_size, part.bits)


def write(folder, arrays):
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
