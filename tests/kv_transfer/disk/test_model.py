# SPDX-License-Identifier: Apache-2.0
"""Random calls on two caches of one root, against a dictionary."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kv_transfer.disk import naive

from vllm_metal.kv_transfer.disk.limits import Limits
from vllm_metal.kv_transfer.disk.space import WriteResult
from vllm_metal.kv_transfer.disk.store import DiskStore

LIMIT = 4096 * 14
ENGINES = st.integers(0, 1)
NUMBERS = st.integers(0, 15)
NAMESPACES = st.sampled_from(["shared", "tenant-1"])


class Cache(RuleBasedStateMachine):
    """Either cache may read what was written, unless it was evicted, and nothing else."""

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp()) / "cache"
        self.now = 1e9
        self.caches = [self.start(), self.start()]
        self.may_hold = set()

    def start(self):
        return DiskStore(self.root, Limits(LIMIT, None), lambda: self.now)

    def folder(self, engine, namespace):
        return self.caches[engine].blocks(naive.FINGERPRINT, naive.FACTS, namespace)

    @rule(engine=ENGINES, namespace=NAMESPACES, number=NUMBERS)
    def write(self, engine, namespace, number):
        self.now += 1
        folder = self.folder(engine, namespace)
        outcome = folder.write(naive.key(number), naive.block(number), self.now, number)
        assert outcome in (WriteResult.STORED, WriteResult.PRESENT)
        if outcome is WriteResult.STORED:
            assert self.on_disk(namespace, number)
        self.may_hold.add((namespace, number))

    @rule(engine=ENGINES, namespace=NAMESPACES, number=NUMBERS)
    def read(self, engine, namespace, number):
        page = naive.blank(naive.block(number))
        there = self.on_disk(namespace, number)
        assert self.folder(engine, namespace).read(naive.key(number), page) == there
        if there:
            assert (namespace, number) in self.may_hold
            assert page == naive.block(number)

    @rule(engine=ENGINES, namespace=NAMESPACES, number=NUMBERS)
    def touch_and_ask(self, engine, namespace, number):
        self.now += 1
        folder = self.folder(engine, namespace)
        folder.touch([naive.key(number)], self.now)
        assert folder.contains(naive.key(number)) == self.on_disk(namespace, number)

    @rule(engine=ENGINES, namespace=NAMESPACES, number=NUMBERS)
    def discard(self, engine, namespace, number):
        self.folder(engine, namespace).discard([naive.key(number)])
        self.may_hold.discard((namespace, number))

    @rule(engine=ENGINES)
    def restart(self, engine):
        self.caches[engine].close()
        self.caches[engine] = self.start()

    def on_disk(self, namespace, number):
        folder = self.root / naive.FINGERPRINT / namespace
        return bool(list(folder.rglob(f"{naive.key(number).hex()}.kv")))

    @invariant()
    def the_limit_holds(self):
        assert naive.room(self.root) <= LIMIT

    def teardown(self):
        for cache in self.caches:
            cache.close()
        shutil.rmtree(self.root.parent)


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=10, stateful_step_count=40)
