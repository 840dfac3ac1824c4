# SPDX-License-Identifier: Apache-2.0
"""Inputs of image models equal those of transformers' processors."""

import asyncio
import io
import sys

import numpy as np
import pytest
import torch
from engine.vision import reference
from engine.vision.checkpoints import FAMILIES
from PIL import Image
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media.image import ImageMediaIO
from vllm.renderers import renderer_from_config
from vllm.v1.engine.input_processor import InputProcessor

from vllm_metal.patches.vllm_patches import image_names

pytestmark = pytest.mark.more
GENERATOR = np.random.default_rng(0)


def pixels(*shape):
    return GENERATOR.integers(0, 256, shape, dtype=np.uint8)


IMAGES = [Image.fromarray(pixels(*size, 3)) for size in ((100, 150), (70, 60), (64, 64))]
FRAMES = pixels(6, 100, 150, 3)
METADATA = {
    "fps": 2.0,
    "duration": 3.0,
    "total_num_frames": 6,
    "frames_indices": list(range(6)),
    "do_sample_frames": False,
}


class Front:
    """The parts of vLLM in front of an engine."""

    def __init__(self, name, folder):
        self.family = FAMILIES[name]
        self.folder = self.family.write(folder)
        options = {"max_model_len": 512} | self.family.options
        config = EngineArgs(model=self.folder, **options).create_engine_config()
        self.renderer = renderer_from_config(config)
        self.processor = InputProcessor(config, renderer=self.renderer)

    def sent(self, prompt, **data):
        """Returns the request that an engine gets."""
        (made,) = self.renderer.render_cmpl([{"prompt": prompt, "multi_modal_data": data}])
        return self.processor.process_inputs(
            "a", made, SamplingParams(), supported_tasks=("generate",)
        )


@pytest.fixture(scope="module", params=FAMILIES)
def front(request, tmp_path_factory):
    return Front(request.param, tmp_path_factory.mktemp(request.param))


def test_tokens_places_and_pixels_are_those_of_transformers(front):
    prompt = "Hello " + " and ".join([front.family.image] * 3) + " what is it?"
    request = front.sent(prompt, image=IMAGES)
    expected = reference.processor(front.folder)(
        text=[front.family.for_transformers(prompt)], images=[IMAGES], return_tensors="pt"
    )
    assert request.prompt_token_ids == expected["input_ids"][0].tolist()
    features = request.mm_features
    assert [feature.modality for feature in features] == ["image"] * 3
    assert len({feature.identifier for feature in features}) == 3
    found = [feature.data["pixel_values"].data for feature in features]
    whole = expected["pixel_values"]
    if front.family.rounds_pixels:
        whole = whole.bfloat16()
    if "image_sizes" in expected:  # padded by transformers, each cut by vLLM
        sizes = expected["image_sizes"].tolist()
        for own, padded, (height, width) in zip(found, whole, sizes, strict=True):
            torch.testing.assert_close(own, padded[:, :height, :width], rtol=0, atol=0)
    else:
        if front.family.architecture.startswith("Gemma4"):  # one axis is of images
            whole = whole.flatten(0, 1)
        torch.testing.assert_close(torch.cat(found), whole, rtol=0, atol=0)
    image_token = expected["input_ids"][0].tolist()
    token = _token_of_images(front)
    places = [
        feature.mm_position.offset + index
        for feature in features
        for index in range(feature.mm_position.length)
        if feature.mm_position.is_embed is None or feature.mm_position.is_embed[index]
    ]
    assert places == [place for place, found in enumerate(image_token) if found == token]


def _token_of_images(front):
    config = front.processor.model_config.hf_config
    return getattr(config, "image_token_id", None) or config.image_token_index


def test_an_image_is_named_by_what_it_shows(front):
    one, other = front.family.image, IMAGES[1]
    names = [
        front.sent(one, image=[image]).mm_features[0].identifier
        for image in (IMAGES[0], IMAGES[0].copy(), other)
    ]
    assert names[0] == names[1] != names[2]


def test_an_image_belongs_to_its_owner(front):
    """vLLM's processor cache must not find it by another owner's name."""
    text, shown = front.family.image, {"image": [IMAGES[0]]}

    def named(data=shown, owner=None, uuid=None, **more):
        prompt = {"prompt": text, "multi_modal_data": data, **more}
        if uuid is not None:
            prompt["multi_modal_uuids"] = {"image": [uuid]}

        async def render():
            if owner is not None:
                image_names.set_owner(owner)
            (made,) = await front.renderer.render_cmpl_async([prompt])
            return made["mm_hashes"]["image"][0]

        return asyncio.run(render())

    plain, a, b = named(), named(cache_salt="a"), named(cache_salt="b")
    assert len({plain, a, b, named(owner="c")}) == 4
    assert a == named(cache_salt="a") == named(owner="a", cache_salt="b")
    # Another image under the name of one that everybody can compute, and one that is only named.
    other = {"image": [IMAGES[1]]}
    planted = named(other, cache_salt="b", uuid=plain), named(other, cache_salt="b", uuid=a)
    assert not {plain, a, b} & {*planted}
    named(cache_salt="a", uuid="SECRET")
    with pytest.raises(ValueError, match="Cache miss"):
        named({"image": [None]}, cache_salt="b", uuid="SECRET")
    assert named({"image": [None]}, cache_salt="a", uuid="SECRET")


def test_frames_of_a_video_are_those_of_transformers(front):
    if front.family.video is None:
        with pytest.raises(VLLMValidationError, match="At most 0 video"):
            front.sent("Hello", video=[(FRAMES, METADATA)])
        return
    request = front.sent(front.family.video + "what happens?", video=[(FRAMES, METADATA)])
    (feature,) = request.mm_features
    processor = reference.processor(front.folder).video_processor
    expected = processor(
        videos=[FRAMES], do_sample_frames=False, return_metadata=False, return_tensors="pt"
    )
    assert feature.modality == "video"
    grid = expected["video_grid_thw"][0]
    assert feature.data["video_grid_thw"].data.tolist() == grid.tolist()
    sent = feature.data["pixel_values_videos"].data
    torch.testing.assert_close(sent, expected["pixel_values_videos"], rtol=0, atol=0)
    assert int(feature.mm_position.is_embed.sum()) == int(grid.prod()) // 4


@pytest.mark.parametrize("front", ["inkling_mm_model"], indirect=True)
def test_sound_is_rejected_where_vllms_class_takes_it(front):
    with pytest.raises(VLLMValidationError, match="0 audio"):
        front.sent("Hello", audio=(np.zeros(1600, np.float32), 16000))


def test_nothing_is_left_under_torchvision_s_name(front):
    assert not [name for name in sys.modules if name.partition(".")[0] == "torchvision"]


def test_a_bomb_is_no_error_of_the_server(front, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    written = io.BytesIO()
    IMAGES[0].save(written, "PNG")
    with pytest.raises(ValueError, match=r"Failed to load image: .*bomb"):
        ImageMediaIO().load_bytes(written.getvalue())
