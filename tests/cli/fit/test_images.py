# SPDX-License-Identifier: Apache-2.0
"""Estimated memory of images, against an engine's."""

import gc

import mlx.core as mx
import pytest
from engine.vision.checkpoints import FAMILIES
from mlx_lm.utils import load_config
from vllm.engine.arg_utils import EngineArgs

from vllm_metal.cli.fit.images import Images
from vllm_metal.engine.vision import room
from vllm_metal.engine.vision.encoder import Encoder
from vllm_metal.engine.vision.families import FAMILIES as SERVED
from vllm_metal.engine.vision.tower import load_weights

pytestmark = pytest.mark.more


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param].write(made)
    return made


def loaded(folder, dtype):
    config = load_config(folder)
    tower = SERVED[config["model_type"]].tower(config)
    load_weights(tower, folder, dtype, config)
    return tower


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_towers_weights_are_what_it_holds(folder, dtype):
    limit = mx.set_cache_limit(0)
    try:
        gc.collect()
        before = mx.get_active_memory()
        tower = loaded(folder, dtype)
        mx.synchronize()
        held = mx.get_active_memory() - before
        assert Images.read(folder, dtype).weights == pytest.approx(held, rel=0.02)
        del tower
    finally:
        mx.set_cache_limit(limit)


def test_rows_are_vllms_and_the_sum_covers_what_is_measured(folder):
    config = EngineArgs(model=str(folder), max_model_len=512).create_engine_config()
    encoder = Encoder(loaded(folder, mx.float32), mx.float32)
    found = Images.read(folder, mx.float32)
    budget = room.MultiModalBudget(config, room.MULTIMODAL_REGISTRY)
    assert found.rows == max(budget.mm_max_toks_per_item.values())
    measured = room.image_bytes(encoder, config)
    estimated = found.extra_bytes(config.scheduler_config.max_num_batched_tokens)
    assert measured <= 1.1 * estimated <= 3 * measured


def test_without_a_tower_there_are_no_images(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    kept = {
        name: array
        for name, array in mx.load(str(folder / "model.safetensors")).items()
        if "language_model" in name and "visual" not in name
    }
    mx.save_safetensors(str(tmp_path / "model.safetensors"), kept)
    assert Images.read(tmp_path, mx.float32) is None
