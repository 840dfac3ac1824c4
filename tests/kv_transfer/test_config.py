# SPDX-License-Identifier: Apache-2.0
"""Settings of the disk cache: both forms are equivalent, and errors are named."""

import copy
import json
import logging
import os
import shutil
import stat
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from kv_transfer.disk.naive import give_away
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_metal.kv_transfer.config import (
    CONNECTOR,
    CONNECTOR_MODULE,
    TransferConfig,
    complete_kv_transfer,
)
from vllm_metal.kv_transfer.disk import limits
from vllm_metal.kv_transfer.disk.config import DiskConfig
from vllm_metal.platform.metal_platform import MetalPlatform


@pytest.fixture
def config(made):
    """An engine's configuration before the platform's checks for a disk cache."""
    return copy.deepcopy(made)


@cache
def parser():
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


def on_command_line(transfer):
    return parser().parse_args(["--kv-transfer-config", json.dumps(transfer)]).kv_transfer_config


def full(path, /, **extra):
    """vLLM's command-line form."""
    given = {"kv_connector": CONNECTOR, "kv_role": "kv_both"}
    return on_command_line(given | {"kv_connector_extra_config": {"path": str(path), **extra}})


def checked(config):
    MetalPlatform.check_and_update_config(config)
    found = TransferConfig.of(config)
    return None if found is None else found.stores["disk"]


@pytest.fixture
def key(tmp_path):
    made = tmp_path / "key"
    made.write_text("0123456789abcdef")
    made.chmod(0o600)
    return made


def test_without_a_setting_nothing_changes(config):
    before = copy.deepcopy(config.cache_config)
    assert checked(config) is None
    assert config.kv_transfer_config is None and config.cache_config == before
    complete_kv_transfer(VllmConfig())  # vLLM makes one without a model, too


def test_the_short_way_and_vllm_s_are_the_same(config, made, tmp_path, key):
    path = tmp_path / "a" / "cache"
    config.additional_config = {
        "fixed_draft_length": True,
        "prefix_cache_dir": str(path),
        "prefix_cache_bytes": "5GB",
        "prefix_cache_daily_writes": "2 GiB",
        "prefix_cache_salt_key": str(key),
    }
    given = config.additional_config
    expected = DiskConfig(path, 5 * 10**9, 2 * 2**30)
    assert checked(config) == expected and TransferConfig.of(config).salt_key == key
    assert config.additional_config == {"fixed_draft_length": True}
    assert len(given) == 5  # the user's own object is left alone
    other = copy.deepcopy(made)
    extra = {"bytes": 5 * 10**9, "daily_writes": "2GiB", "salt_key": str(key)}
    other.kv_transfer_config = full(path, **extra)
    assert checked(other) == expected
    for name in vars(other.kv_transfer_config).keys() - {"engine_id"}:
        assert getattr(config.kv_transfer_config, name) == getattr(other.kv_transfer_config, name)
    assert other.kv_transfer_config.kv_connector_module_path == CONNECTOR_MODULE
    assert other.kv_transfer_config.kv_role == "kv_both"
    assert other.kv_transfer_config.kv_connector_extra_config == {
        "spec_name": "MetalOffloadingSpec",
        "path": str(path),
        "bytes": 5 * 10**9,
        "daily_writes": 2 * 2**30,
        "salt_key": str(key),
        "offload_prompt_only": False,
    }
    json.dumps(other.kv_transfer_config.kv_connector_extra_config)


@pytest.mark.parametrize("way", ["short", "full"])
def test_the_engines_process_completes_it_again_and_finds_the_same(
    config, tmp_path, monkeypatch, way
):
    path = tmp_path / "cache"
    if way == "short":
        config.additional_config = {"prefix_cache_dir": str(path)}
    else:
        config.kv_transfer_config = full(path)
    found = checked(config)
    transfer = copy.deepcopy(config.kv_transfer_config)
    monkeypatch.setattr(limits, "default_max_bytes", lambda path: 1)  # the free space has changed
    monkeypatch.setattr("vllm_metal.kv_transfer.disk.config.default_max_bytes", lambda path: 1)
    assert checked(config) == found
    assert config.kv_transfer_config == transfer


def test_defaults(config, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=70 * 10**9))
    config.additional_config = {"prefix_cache_dir": str(tmp_path)}
    found = checked(config)
    assert found.max_bytes == 7 * 10**9
    assert found.daily_write_bytes == limits.DEFAULT_DAILY_WRITE_BYTES
    assert TransferConfig.of(config).salt_key is None


def test_a_full_disk_does_not_stop_a_start(config, tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_metal.kv_transfer.disk.config.default_max_bytes", lambda path: 0)
    config.kv_transfer_config = full(tmp_path)
    assert checked(config) == checked(config)
    assert TransferConfig.of(config).stores["disk"].max_bytes == 1


def test_unlimited_writes(config, tmp_path):
    config.kv_transfer_config = full(tmp_path, daily_writes="unlimited")
    assert checked(config).daily_write_bytes is None
    assert checked(config).daily_write_bytes is None


def test_hashes_are_the_same_in_every_process(config, tmp_path):
    assert config.cache_config.prefix_caching_hash_algo == "sha256"
    config.kv_transfer_config = full(tmp_path)
    checked(config)
    assert config.cache_config.prefix_caching_hash_algo == "sha256_cbor"


@pytest.mark.parametrize(
    ("written", "policy"), [({}, "recompute"), ({"kv_load_failure_policy": "fail"}, "fail")]
)
def test_fail_is_honored_where_it_is_written(config, tmp_path, written, policy):
    extra = {"kv_connector_extra_config": {"path": str(tmp_path)}}
    given = {"kv_connector": CONNECTOR, "kv_role": "kv_both"} | extra | written
    for transfer in (on_command_line(given), KVTransferConfig(**given)):
        config.kv_transfer_config = transfer
        checked(config)
        assert config.kv_transfer_config.kv_load_failure_policy == policy


def test_home_is_found_and_relative_paths_made_absolute(config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for path in ("~/cache", "cache"):
        config.kv_transfer_config = full(path)
        assert checked(config).directory == tmp_path / "cache"


def test_the_folder_is_made_for_its_owner_alone(config, tmp_path):
    config.kv_transfer_config = full(tmp_path / "a" / "b")
    assert stat.S_IMODE(checked(config).directory.stat().st_mode) == 0o700
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"byte": "5GB"}, "no key 'byte' .*mean 'bytes'"),
        ({"bytes": "much"}, "'bytes' is not a size: 'much'"),
        ({"daily_writes": 0}, "'daily_writes' must be .*\"unlimited\" lifts the limit"),
        ({"path": 7}, "'path' must be a path, not 7"),
        ({"offload_prompt_only": "no"}, "'offload_prompt_only' must be true or false, not 'no'"),
        ({"blocks_per_chunk": 4}, "'blocks_per_chunk' must be 1"),
        ({"blocks_per_chunk": True}, "'blocks_per_chunk' must be 1"),
        ({"block_size": 64}, "'block_size' 64 must equal the block size of the KV cache, 16"),
        ({"block_size": "16"}, "'block_size' must be a number of tokens"),
        ({"spec_name": "CPUOffloadingSpec"}, "'spec_name' must be 'MetalOffloadingSpec'"),
        ({"cpu_bytes_to_use": 1}, "no key 'cpu_bytes_to_use'"),
    ],
)
def test_mistakes_of_the_extra_configuration_are_named(config, tmp_path, extra, reason):
    config.kv_transfer_config = full(tmp_path, **extra)
    with pytest.raises(
        ValueError, match=f"--kv-transfer-config kv_connector_extra_config.*{reason}"
    ):
        checked(config)


def test_one_block_a_chunk_may_be_written(config, tmp_path):
    for extra in ({"blocks_per_chunk": 1}, {"block_size": 16}, {"offload_prompt_only": True}):
        config.kv_transfer_config = full(tmp_path, **extra)
        assert checked(config).directory == tmp_path
        complete = config.kv_transfer_config.kv_connector_extra_config
        assert complete["offload_prompt_only"] == ("offload_prompt_only" in extra)


def test_a_connector_without_a_path_is_named(config):
    config.kv_transfer_config = KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_both")
    with pytest.raises(ValueError, match="kv_connector_extra_config lacks 'path'"):
        checked(config)


def test_both_ways_at_once_are_refused(config, tmp_path):
    config.additional_config = {"prefix_cache_dir": str(tmp_path)}
    config.kv_transfer_config = full(tmp_path)
    with pytest.raises(ValueError, match=r"'prefix_cache_dir' and --kv-transfer-config"):
        checked(config)


def test_a_cache_on_disk_needs_one_in_memory(config, tmp_path):
    config.cache_config.enable_prefix_caching = False
    config.kv_transfer_config = full(tmp_path)
    with pytest.raises(ValueError, match=r"prefix_cache_dir.* --no-enable-prefix-caching"):
        checked(config)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_weak_hashes_are_refused(config, tmp_path, algorithm):
    config.cache_config.prefix_caching_hash_algo = algorithm
    config.kv_transfer_config = full(tmp_path)
    reason = rf"--prefix-caching-hash-algo {algorithm} .*not a cryptographic .*Choose sha256_cbor"
    with pytest.raises(ValueError, match=reason):
        checked(config)


def test_a_folder_that_cannot_be_is_named(config, tmp_path):
    file, full_folder = tmp_path / "file", tmp_path / "photos"
    file.write_text("x")
    full_folder.mkdir()
    (full_folder / "holiday.jpg").write_text("x")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    for path, reason in (
        (file, "is a file; name a folder"),
        (file / "below", "file.* cannot be used .*name a folder that you may"),
        (Path("/proc/cache"), "cannot be used"),
        (tmp_path / "broken", "cannot be used"),
        (full_folder, "contains other files; choose an empty"),
    ):
        config.kv_transfer_config = full(path)
        with pytest.raises(ValueError, match=rf"prefix_cache_dir, or 'path' of .*{reason}"):
            checked(config)
    assert file.read_text() == "x" and os.listdir(full_folder) == ["holiday.jpg"]


def test_a_folder_of_another_user_is_refused(config, tmp_path, monkeypatch):
    """In any mode, and through a link: its blocks could be anything."""
    (planted := tmp_path / "planted").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(planted)
    give_away(planted, monkeypatch)
    for path in (planted, tmp_path / "link"):
        config.kv_transfer_config = full(path)
        with pytest.raises(ValueError, match=r"belongs to another user .*chown"):
            checked(config)


def test_a_folder_that_can_only_be_read_is_warned_of(config, tmp_path, monkeypatch, caplog):
    def read_only(dir):
        raise PermissionError(13, "Permission denied")  # tests may run as root, whom no mode stops

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    config.kv_transfer_config = full(tmp_path)
    with caplog.at_level(logging.WARNING, "vllm_metal.kv_transfer.disk.config"):
        assert checked(config).directory == tmp_path
    (record,) = [r for r in caplog.records if r.name == "vllm_metal.kv_transfer.disk.config"]
    assert f"{tmp_path} is not writable (Permission denied)" in record.getMessage()


def test_a_folder_that_others_can_write_to_is_warned_of(config, tmp_path, caplog):
    for mode, warned in ((0o700, False), (0o755, False), (0o777, True), (0o720, True)):
        tmp_path.chmod(mode)
        config.kv_transfer_config = full(tmp_path)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "vllm_metal.kv_transfer.disk.config"):
            checked(config)
        found = [r for r in caplog.records if r.name == "vllm_metal.kv_transfer.disk.config"]
        assert bool(found) == warned, mode
        assert all(f"chmod go-w {tmp_path}" in record.getMessage() for record in found)


def test_the_salts_key_is_tried_before_a_model_loads(config, tmp_path, key):
    key.chmod(0o644)
    config.kv_transfer_config = full(tmp_path / "cache", salt_key=str(key))
    with pytest.raises(ValueError, match=r"prefix_cache_salt_key: .*chmod 600"):
        checked(config)
