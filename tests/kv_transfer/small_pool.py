# SPDX-License-Identifier: Apache-2.0
"""A tiny pool with its blocks as pages, and a store on a real disk cache."""

from __future__ import annotations

import time
from threading import Event

import mlx.core as mx
import numpy as np
import vllm.config  # noqa: F401 — before vllm.distributed, or they import each other
from vllm.v1.kv_offload.base import make_offload_key

from vllm_metal.engine.kv_cache.layer_cache import KVShape
from vllm_metal.engine.kv_cache.pages import BlockPages
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.identity.fingerprint import Fingerprint, PoolContent
from vllm_metal.kv_transfer.disk.block_folder import BlockFolder
from vllm_metal.kv_transfer.disk.limits import Limits
from vllm_metal.kv_transfer.disk.store import DiskStore
from vllm_metal.kv_transfer.messages import PageKeys
from vllm_metal.kv_transfer.page_store import PageStore

NUM_BLOCKS, BLOCK = 12, 4
FINGERPRINT = Fingerprint("ab12", {"model": "test"})
#: A page: keys and values of 4 tokens, one head of 16 float32.
PAGE_BYTES = 2 * BLOCK * 16 * 4
CONTENT = PoolContent(FINGERPRINT, (PAGE_BYTES, PAGE_BYTES))


class SmallPool:
    """Two groups of one layer each that share a storage, as in a hybrid model."""

    def __init__(self, seed=0):
        self.state = SCATTER.allocate(NUM_BLOCKS, BLOCK, KVShape(1, 16, 16), mx.float32)
        rng = np.random.default_rng(seed)
        self.state.arrays = [mx.array(rng.normal(size=a.shape)) for a in self.state.arrays]
        mx.eval(self.state.arrays)
        self.pages = BlockPages({"a": self.state, "b": self.state}, [["a"], ["b"]])

    def block(self, block):
        """Returns its bytes."""
        return b"".join(np.array(array)[:, block].tobytes() for array in self.state.arrays)

    def fill(self, block, value):
        for array in self.state.arrays:
            array[:, block] = value
        mx.eval(self.state.arrays)


def store_on(folder, limits=None, **options):
    """Makes a PageStore on a folder with pages of CONTENT."""
    disk = DiskStore(folder, limits or Limits(10**8, None), **options)
    store = PageStore({"disk": disk})
    store.use(CONTENT)
    return store


def folder_of(store, namespace="shared"):
    """Returns the BlockFolder of a namespace."""
    return store.stores["disk"].folder_of(store.namespace(namespace))


def keys_of(names, namespace="shared", group=0, used_at=1e9):
    """Returns keys of pages by name, and their locations."""
    keys = [make_offload_key(str(name).encode().rjust(32, b"-"), group) for name in names]
    ends = [BLOCK * (index + 1) for index in range(len(keys))]
    return PageKeys(keys, ends, namespace, used_at)


def on_disk(store, keys):
    """Returns the pages' bytes; None for missing ones."""
    folder, found = folder_of(store, keys.namespace), []
    for key in keys.keys:
        content = bytearray(PAGE_BYTES)
        found.append(bytes(content) if folder.read(key, memoryview(content)) else None)
    return found


def all_ended(ended_now, wanted):
    """Waits until jobs have ended; returns all ended ones by job id."""
    ended, deadline = {}, time.monotonic() + 60
    while not ended.keys() >= set(wanted):
        assert time.monotonic() < deadline, (ended, wanted)
        for job in ended_now():
            assert job.job_id not in ended
            ended[job.job_id] = job
        time.sleep(0.001)
    return ended


def held_up(monkeypatch, name):
    """Blocks a method of each BlockFolder; yields the event that releases it."""
    event, method = Event(), getattr(BlockFolder, name)

    def wait(*args, **kwargs):
        event.wait(120)
        return method(*args, **kwargs)

    monkeypatch.setattr(BlockFolder, name, wait)
    yield event
    event.set()
