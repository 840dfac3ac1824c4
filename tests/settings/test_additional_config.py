# SPDX-License-Identifier: Apache-2.0
"""--additional-config: every key has a reader, and errors come before loading."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from metal_kernels.paged_attention.splits import WHOLE
from vllm_metal.settings.additional_config import MIN_SPLIT, VLLM_KEYS, AdditionalConfig

DIR = {"prefix_cache_dir": "/cache"}


def read(given):
    return AdditionalConfig.of(SimpleNamespace(additional_config=given))


@pytest.fixture(scope="module")
def model():
    from vllm_metal.engine.models.embedded import embedded_model_path

    return str(embedded_model_path(dequantize=True))


def test_defaults_and_what_is_given(model):
    assert AdditionalConfig.of(VllmConfig()) == AdditionalConfig(fixed_draft_length=False)
    assert read(None) == AdditionalConfig()
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    given = parser.parse_args(["--additional-config", '{"fixed_draft_length": true}'])
    args = EngineArgs(model=model, max_model_len=64, additional_config=given.additional_config)
    assert AdditionalConfig.of(args.create_engine_config()).fixed_draft_length


def test_the_bound_on_steps(model, monkeypatch):
    for device, bound in (("cpu", 200), ("metal", 60)):
        with monkeypatch.context() as patch:
            patch.setenv("VLLM_METAL_DEVICE", device)
            assert AdditionalConfig().max_step_ms == bound
    assert read({"max_step_ms": 25}).max_step_ms == 25
    assert read({"max_step_ms": 0.5}).max_step_ms == 0.5
    assert read({"max_step_ms": None}).max_step_ms is None
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    given = parser.parse_args(["--additional-config", '{"max_step_ms": null}'])
    args = EngineArgs(model=model, max_model_len=64, additional_config=given.additional_config)
    assert AdditionalConfig.of(args.create_engine_config()).max_step_ms is None


def test_the_cache_on_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    found = read(
        {
            "prefix_cache_dir": "~/cache",
            "prefix_cache_bytes": "5GB",
            "prefix_cache_daily_writes": 7,
            "prefix_cache_salt_key": "key",
        }
    )
    assert found == AdditionalConfig(
        prefix_cache_dir=Path("/home/me/cache"),
        prefix_cache_bytes=5_000_000_000,
        prefix_cache_daily_writes=7,
        prefix_cache_salt_key=tmp_path / "key",
    )
    assert read(DIR) == AdditionalConfig(prefix_cache_dir=Path("/cache"))
    assert read(DIR | {"prefix_cache_daily_writes": "unlimited"}).prefix_cache_daily_writes == (
        "unlimited"
    )


def test_parts_that_can_be_asked_for_are_those_that_kernels_can_have():
    assert read({"fixed_splits": MIN_SPLIT}).fixed_splits == WHOLE
    assert read({"fixed_splits": 1040}).fixed_splits == 1040
    assert read({"fixed_splits": None}).fixed_splits is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"fixed_draft_lenght": True}, "no key 'fixed_draft_lenght' .*mean 'fixed_draft_length'"),
        (
            {"else": 1},
            r"no key 'else' \(known: 'fixed_.*', 'dense_check', .*, 'prefix_.*'\)$",
        ),
        ({"fixed_draft_length": 1}, "'fixed_draft_length' must be true or false, not 1"),
        ({"fixed_draft_length": "true"}, "must be true or false, not 'true'"),
        ({"fixed_draft_length": None}, "must be true or false, not None"),
        ({"normalise_prompts": [], "normalize_prompts": []}, "'normalise_prompts' and 'normalize_"),
        ({"normalise_prompts": "times"}, "'normalize_prompts' must be a list of billing_.*'times'"),
        ({"normalize_prompts": "times"}, "'normalize_prompts' must be a list of billing_.*'times'"),
        ({"normalize_prompts": ["dates"]}, r"must be a list of .*uuids, not \['dates'\]"),
        ({"fixed_splits": True}, "'fixed_splits' must be a multiple of 16 from 256 on.*not True"),
        ({"fixed_splits": 128}, "'fixed_splits' must be .* from 256 on, or null .*, not 128"),
        ({"fixed_splits": 500}, "'fixed_splits' must be a multiple of 16 .*, not 500"),
        ({"fixed_splits": 512.0}, "'fixed_splits' must be a multiple of 16 .*, not 512.0"),
        ({"max_step_ms": 0}, "'max_step_ms' must be .* or null for no bound, not 0"),
        ({"max_step_ms": -5}, "'max_step_ms' must be a number of milliseconds"),
        ({"max_step_ms": True}, "'max_step_ms' must be a number of milliseconds"),
        ({"max_step_ms": "60"}, "'max_step_ms' must be a number of milliseconds"),
        ({"max_step_ms": float("inf")}, "'max_step_ms' must be a number of milliseconds"),
        ({"prefix_cache_dir": 5}, "'prefix_cache_dir' must be a path, not 5"),
        ({"prefix_cache_dir": " "}, "'prefix_cache_dir' must be a path, not ' '"),
        ({"prefix_cache_dir": "~nobody-of-that-name/x"}, "'prefix_cache_dir' must be a path"),
        (DIR | {"prefix_cache_bytes": "lots"}, "'prefix_cache_bytes' is not a size: 'lots' .*50GB"),
        (DIR | {"prefix_cache_bytes": True}, "'prefix_cache_bytes' must be a number of bytes"),
        (DIR | {"prefix_cache_bytes": "unlimited"}, "'prefix_cache_bytes' is not a size"),
        (DIR | {"prefix_cache_daily_writes": 0}, 'daily_writes\' must .*"unlimited" lifts the'),
        (
            DIR | {"prefix_cache_daily_writes": "0 GB"},
            'daily_writes\' is not a size: .*"unlimited"',
        ),
        (DIR | {"prefix_cache_salt_key": b"secret"}, "'prefix_cache_salt_key' must be a path"),
        (DIR | {"prefix_cache_size": "5GB"}, "no key 'prefix_cache_size' .*mean 'prefix_cache_"),
        ({"prefix_cache_bytes": "5GB"}, "'prefix_cache_bytes' needs 'prefix_cache_dir'"),
        ({"prefix_cache_daily_writes": "5GB"}, "'prefix_cache_daily_writes' needs 'prefix_cache_d"),
        ({"prefix_cache_salt_key": "k"}, "'prefix_cache_salt_key' needs 'prefix_cache_dir'"),
        ({"idle_sleep": "soon"}, "'idle_sleep' is not a time: 'soon' .*10m"),
        ({"idle_sleep": "never"}, "'idle_sleep' is not a time"),
        ({"idle_sleep_weights": "no"}, "'idle_sleep_weights' is not a time: .*or write \"never\""),
        ({"idle_sleep_weights": "10m"}, "'idle_sleep_weights' needs 'idle_sleep'"),
        ({"idle_sleep": "10m", "idle_sleep_weights": "9m"}, "may be no shorter"),
        ([], "must be a JSON object .*'fixed_draft_length', .*, not a list"),
        (SimpleNamespace(compute_hash=str), "must be a JSON object .*not a SimpleNamespace"),
    ],
)
def test_mistakes_are_named(given, reason):
    with pytest.raises(ValueError, match=f"--additional-config.*{reason}"):
        read(given)


def test_the_platform_reads_it_before_a_model_is_loaded(model):
    args = EngineArgs(model=model, max_model_len=64, additional_config={"fixed": True})
    with pytest.raises(ValueError, match="--additional-config has no key 'fixed'"):
        args.create_engine_config()


def test_options_that_vllm_passes_on_by_it_are_let_through(model):
    options = {"gdn_prefill_backend": "triton", "kda_prefill_backend": "triton"}
    options |= {"kda_decode_backend": "triton"}
    assert options.keys() == set(VLLM_KEYS)
    found = EngineArgs(model=model, max_model_len=64, **options).create_engine_config()
    assert found.additional_config == options
    assert AdditionalConfig.of(found) == AdditionalConfig()
