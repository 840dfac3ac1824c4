# SPDX-License-Identifier: Apache-2.0
"""Settings of transfers between engines: requirements of each role, and errors."""

import copy
import json

import psutil
import pytest
from vllm.config import KVTransferConfig
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from vllm_metal.kv_transfer.config import CONNECTOR, TransferConfig
from vllm_metal.platform.metal_platform import MetalPlatform
from vllm_metal.platform.refusals import refuse_unsupported
from vllm_metal.settings.address import Address

HERE, THERE = "127.0.0.1:9100", "127.0.0.1:9101"
FAR = "192.0.2.7:9100"  # a documentation address, RFC 5737


@pytest.fixture
def check(made):
    """Returns the parsed settings of a role and its keys."""

    def of(role, **extra):
        config = copy.deepcopy(made)
        config.kv_transfer_config = KVTransferConfig(
            kv_connector=CONNECTOR, kv_role=role, kv_connector_extra_config=extra
        )
        refuse_unsupported(config)
        MetalPlatform.check_and_update_config(config)
        found = TransferConfig.of(config)
        json.dumps(config.kv_transfer_config.kv_connector_extra_config)
        MetalPlatform.check_and_update_config(config)  # as the engine's process does
        assert TransferConfig.of(config) == found
        assert config.cache_config.prefix_caching_hash_algo == "sha256_cbor"
        return found.stores

    return of


@pytest.fixture
def secret(tmp_path):
    made = tmp_path / "secret"
    made.write_text("0123456789abcdef")
    made.chmod(0o600)
    return made


def test_each_role_has_what_it_needs(check, tmp_path):
    producer = check("kv_producer", listen=HERE, outbox_bytes="2GB")
    assert "disk" not in producer and producer["peers"].peers == ()
    assert producer["peers"].listen == Address("127.0.0.1", 9100)
    assert producer["peers"].outbox_bytes == 2 * 10**9
    consumer = check("kv_consumer", peers=[HERE, THERE])
    assert consumer["peers"].listen is None and consumer["peers"].outbox_bytes == 0
    assert [str(each) for each in consumer["peers"].peers] == [HERE, THERE]
    both = check("kv_both", listen=HERE, peers=[THERE], path=str(tmp_path / "cache"))
    assert both["disk"].directory == tmp_path / "cache"
    assert both["peers"].listen and both["peers"].peers
    for role in ("kv_both", "kv_producer", "kv_consumer"):  # two engines may share a folder
        assert "peers" not in check(role, path=str(tmp_path / "cache"))


def test_the_outbox_is_a_part_of_this_machine_s_memory(check):
    found = check("kv_producer", listen=HERE)["peers"].outbox_bytes
    assert found == min(psutil.virtual_memory().total // 16, 4 << 30)


def test_beyond_this_machine_a_secret_is_needed(check, secret):
    for role, extra in (("kv_producer", {"listen": FAR}), ("kv_consumer", {"peers": [HERE, FAR]})):
        with pytest.raises(ValueError, match=rf"{FAR}, beyond this machine.* 'secret'"):
            check(role, **extra)
        found = check(role, secret=str(secret), **extra)["peers"]
        assert found.read_secret() == b"0123456789abcdef"
    secret.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        check("kv_producer", listen=FAR, secret=str(secret))


@pytest.mark.parametrize(
    ("role", "extra", "reason"),
    [
        ("kv_producer", {}, "'kv_producer' needs .*'listen'"),
        ("kv_producer", {"listen": HERE, "peers": [THERE]}, "does not use .*'peers'.*kv_both"),
        ("kv_consumer", {"listen": HERE}, "'kv_consumer' needs .*'peers'"),
        ("kv_consumer", {"listen": HERE, "peers": [THERE]}, "does not use .*'listen'.*kv_both"),
        ("kv_both", {}, "lacks 'path'.* 'listen' and 'peers'"),
        ("kv_both", {"secret": "/tmp/x"}, "'secret' has no effect without 'listen' or 'peers'"),
        ("kv_consumer", {"peers": [HERE], "outbox_bytes": 5}, "'outbox_bytes' needs 'listen'"),
        ("kv_consumer", {"peers": [HERE], "bytes": "5GB"}, "'bytes' needs 'path'"),
        ("kv_consumer", {"peers": HERE}, "'peers' must be a list of addresses"),
        ("kv_consumer", {"peers": []}, "'peers' must be a list of addresses"),
        ("kv_consumer", {"peers": [HERE, HERE]}, "'peers' names an address twice"),
        ("kv_producer", {"listen": "9100"}, "'listen' '9100' has no port"),
        ("kv_producer", {"listen": 9100}, "'listen' must be an address"),
        ("kv_producer", {"listen": HERE, "share": "pool"}, "'share' needs kv_role 'kv_both'"),
        ("kv_both", {"peers": [HERE], "share": "pool"}, "'share' needs .* 'listen'"),
        ("kv_both", {"listen": HERE, "share": True}, "'share' must be 'pool'"),
        ("kv_producer", {"listn": HERE}, "no key 'listn'.*did you mean 'listen'"),
    ],
)
def test_mistakes_are_named(check, role, extra, reason):
    with pytest.raises(ValueError, match=reason):
        check(role, **extra)


def test_a_replica_shares_its_pool_and_keeps_a_small_outbox(check):
    found = check("kv_both", listen=HERE, peers=[THERE], share="pool")["peers"]
    assert found.shares_pool and not found.is_waited_for
    assert found.outbox_bytes == min(psutil.virtual_memory().total // 64, 1 << 30)
    assert check("kv_both", listen=HERE, share="pool", outbox_bytes=5)["peers"].outbox_bytes == 5
    assert not check("kv_both", listen=HERE)["peers"].shares_pool


def test_a_worker_in_another_process_cannot_share_its_pool(made, check, monkeypatch):
    """Nothing in that process could wake an idle engine."""
    monkeypatch.setattr(made.parallel_config, "distributed_executor_backend", MultiprocExecutor)
    with pytest.raises(ValueError, match="'share' needs the engine and its worker in one process"):
        check("kv_both", listen=HERE, share="pool")
