# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's scheduler with the connector, and a model whose K/V are a hash of the text.

A block's K/V identify their text, so a wrong read is detected.
"""

from __future__ import annotations

import itertools
import json
import pickle
import time
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import torch
from kv_transfer.small_pool import folder_of
from vllm import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_metal.engine.kv_cache.pages import PagePart
from vllm_metal.engine.worker.model_runner import ModelRunner
from vllm_metal.engine.worker.recovery import RecoveringRunner
from vllm_metal.identity.fingerprint import Fingerprint
from vllm_metal.kv_transfer.disk.limits import Limits
from vllm_metal.kv_transfer.disk.store import DiskStore
from vllm_metal.kv_transfer.page_store import PageStore
from vllm_metal.kv_transfer.transfer_hooks import TransferHooks
from vllm_metal.patches.vllm_patches.step_result import NOT_A_NUMBER, StepResult

BLOCK, WINDOW, MAX_LEN = 16, 40, 512
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": MAX_LEN,
}
#: Device outcomes of a step.
GOOD, RAISES_IN_FORWARD, RAISES_IN_SAMPLE, FAILS_ON_DEVICE = range(4)


class Text:
    """A prompt and its continuation."""

    def __init__(self, prompt):
        self.num_prompt_tokens = len(prompt)
        self.tokens = list(prompt)
        self._states = [1]
        self._kv_np = np.zeros(MAX_LEN, np.float32)
        self._num_kv = 0

    def state(self, length):
        """Returns a number that identifies the first `length` tokens."""
        while len(self._states) <= length:
            position = len(self._states) - 1
            if position == len(self.tokens):
                self.tokens.append((self._states[-1] >> 33) % 90)
            token = self.tokens[position]
            mixed = self._states[-1] * 6364136223846793005 + token * 2 + 1442695040888963407
            self._states.append(mixed % 2**64)
        return self._states[length]

    def token(self, position):
        self.state(position + 1)
        return self.tokens[position]

    def kv(self, group, start, stop):
        """[stop - start] float32, exact."""
        while self._num_kv < stop:
            self._kv_np[self._num_kv] = self.state(self._num_kv + 1) >> 41
            self._num_kv += 1
        return self._kv_np[start:stop] + group


class Pool:
    """[num_blocks, BLOCK] float32, with the methods of BlockPages."""

    def __init__(self, num_blocks, num_groups=1):
        self.kv_np = np.zeros((num_blocks, BLOCK), np.float32)
        self.sizes = (BLOCK * 4,) * num_groups
        self.broken = False  # whether a step on it failed on the device
        self.joined = set()  # blocks that the current step copies out

    def parts(self, group):
        return (PagePart((BLOCK,), mx.float32, BLOCK * 4),)

    def page_bytes(self, group):
        return BLOCK * 4

    def queue_export(self, group, blocks_np):
        self.joined |= set(blocks_np.tolist())
        if self.broken:
            return [object()]  # unreadable
        return [mx.array(self.kv_np[blocks_np])]

    def export(self, group, blocks_np):
        self._settle()
        return [mx.array(self.kv_np[blocks_np])]

    def import_pages(self, group, blocks_np, rows):
        self._settle()
        assert len(set(blocks_np.tolist())) == len(blocks_np) and 0 not in blocks_np
        self.kv_np[blocks_np] = rows.view(np.float32)[: len(blocks_np)]

    def _settle(self):
        if self.broken:
            raise RuntimeError("the device failed")


class Runner(ModelRunner):
    """A ModelRunner without a model. `engine` has the texts, and determines steps' outcomes."""

    def __init__(self, engine, num_groups, num_blocks):
        super().__init__(None, None, None, 1, hooks=engine.hooks)
        self._engine, self._num_groups = engine, num_groups
        self.pool = Pool(num_blocks, num_groups)
        self.settled = []
        self._fate = GOOD

    def complete_draft_kv(self, ends):
        self.settled.append(dict(ends))

    def join_step(self, arrays):
        pass

    @property
    def layers(self):
        return SimpleNamespace(block_pages=lambda: self.pool)

    def wait(self):
        self.pool._settle()

    def take_draft_token_ids(self):
        return None

    def update_requests(self, step):
        """Updates requests, which outlive a runner, as in the worker."""
        tables = self._engine.tables
        for req_id in step.finished_req_ids:
            tables.pop(req_id, None)
        for new in step.scheduled_new_reqs:
            tables[new.req_id] = [list(of_group) for of_group in new.block_ids]
            self._engine.known[new.req_id] = len(new.prompt_token_ids)
        cached = step.scheduled_cached_reqs
        for req_id, blocks, num_output in zip(
            cached.req_ids, cached.new_block_ids, cached.num_output_tokens, strict=True
        ):
            if req_id in cached.resumed_req_ids:
                tables[req_id] = [list(of_group) for of_group in blocks]
                text = self._engine.texts[req_id]
                self._engine.known[req_id] = text.num_prompt_tokens + num_output
            elif blocks is not None:
                for of_group, added in zip(tables[req_id], blocks, strict=True):
                    of_group += added

    def update_blocks(self, step):
        assert not step.kv_cache_block_copies
        for block in step.new_block_ids_to_zero or ():
            self.pool.kv_np[block] = 0

    def forward(self, step):
        self._fate = self._engine.fate()
        if self._fate == RAISES_IN_FORWARD:
            raise RuntimeError("the forward failed")
        self.pool.joined.clear()
        if self._fate == FAILS_ON_DEVICE:
            self.pool.broken = True
        self._step = step

    def submit(self, grammar_output):
        if self._fate == RAISES_IN_SAMPLE:
            raise RuntimeError("the sampling failed")
        step, starts = self._step, {}
        for new in step.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        starts |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        sampled, failures = {}, {}
        for req_id, count in step.num_scheduled_tokens.items():
            sampled[req_id] = self._compute(req_id, starts[req_id], count, failures)
        return Output(self.pool, sampled, failures)

    def _compute(self, req_id, start, count, failures):
        """Checks the K/V that the tokens read, and writes theirs; returns the next tokens."""
        text, end = self._engine.texts[req_id], start + count
        sound = not self._engine.poisons(req_id)
        for group, table in enumerate(self._engine.tables[req_id]):
            first = 0 if group == 0 else max(0, start - WINDOW + 1)
            if not self.pool.broken:
                found = self._slots(table, first, start)
                expected = text.kv(group, first, start)
                if np.isnan(found).any():
                    sound = False
                else:
                    assert (found == expected).all(), (req_id, group, found, expected)
        for group, table in enumerate(self._engine.tables[req_id]):
            positions = np.arange(start, end)
            blocks = np.array(table, np.int64)[positions // BLOCK]
            assert (blocks != 0).all() and not self.pool.joined.intersection(blocks.tolist())
            values = text.kv(group, start, end) if sound else np.nan
            self.pool.kv_np[blocks, positions % BLOCK] = values
        if end < self._engine.known[req_id]:
            return []
        self._engine.known[req_id] = end + 1
        if not sound:
            failures[req_id] = NOT_A_NUMBER
            return []
        return [text.token(end)]

    def _slots(self, table, start, stop):
        positions = np.arange(start, stop)
        blocks = np.array(table, np.int64)[positions // BLOCK]
        assert (blocks != 0).all()
        return self.pool.kv_np[blocks, positions % BLOCK]


class Output:
    """The calls of StepOutput."""

    always_waits = checked = False

    def __init__(self, pool, sampled, failures):
        self._pool, self._sampled, self._failures = pool, sampled, failures
        self.batch = SimpleNamespace(requests=[SimpleNamespace(req_id=r) for r in sampled])

    def get_output(self):
        self._pool._settle()
        ids = list(self._sampled)
        return StepResult(
            req_ids=ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(ids)},
            sampled_token_ids=list(self._sampled.values()),
            failures=self._failures,
        )


def engine_config(folder, cache, **options):
    from vllm.engine.arg_utils import EngineArgs

    (folder / "config.json").write_text(json.dumps(MODEL))
    given = {
        "max_model_len": MAX_LEN,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": BLOCK,
        "enable_prefix_caching": True,
        "additional_config": {"prefix_cache_dir": str(cache), "prefix_cache_bytes": "1GB"},
    }
    arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, **(given | options))
    return arguments.create_engine_config()


def kv_cache_config(num_blocks, num_groups):
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
    specs = [FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=WINDOW)]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer.{group}"], spec)
            for group, spec in enumerate(specs[:num_groups])
        ],
    )


def sent(message):
    """Returns the message as another process receives it."""
    return pickle.loads(pickle.dumps(message))


class Engine:
    """Like vLLM's EngineCore: schedules, runs and updates, with one or two steps in flight.

    Scheduler and worker get copies of each other's messages.
    """

    def __init__(self, config, cache, num_blocks=40, num_groups=1, limits=None, clock=None):
        """
        Args:
            config: result of `engine_config`.
            cache: folder of the disk cache.
        """
        init_none_hash(sha256_cbor)
        self._hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        config.cache_config.num_gpu_blocks = num_blocks
        self.ahead = config.scheduler_config.async_scheduling
        kind = AsyncScheduler if self.ahead else Scheduler
        self.scheduler = kind(
            config,
            kv_cache_config(num_blocks, num_groups),
            StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.texts, self.hashes, self.tables, self.known = {}, {}, {}, {}
        self.ended, self.outputs = {}, {}  # by request id: finish reason, tokens
        self.fate = lambda: GOOD
        self.poisoned = set()  # requests whose next step produces NaN
        self._numbers = itertools.count()
        limits = limits or Limits(10**9, None)
        self.folder = cache
        self.disk = DiskStore(cache, limits, **({"clock": clock} if clock else {}))
        fingerprint = Fingerprint("ab12", {"model": "test"})
        self.store = PageStore({"disk": self.disk})
        self.hooks = TransferHooks(self.store, lambda: fingerprint, BLOCK)
        # Steps fail at random, often close to each other.
        self.runner = RecoveringRunner(
            lambda graphs: Runner(self, num_groups, num_blocks), self.hooks, most_failures=1000
        )
        self.connector = self.scheduler.connector
        self.connector.set_xfer_handshake_metadata({0: sent(self.store.handshake())})
        self._in_flight = deque()

    def poisons(self, req_id):
        if req_id not in self.poisoned:
            return False
        self.poisoned.discard(req_id)
        return True

    def add(self, prompt, max_tokens=8, salt=None):
        req_id = f"r{next(self._numbers)}"
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=None)
        request = Request(
            req_id, list(prompt), params, None, cache_salt=salt, block_hasher=self._hasher
        )
        self.texts[req_id], self.hashes[req_id] = Text(prompt), request.block_hashes
        self.outputs[req_id] = []
        self.scheduler.add_request(request)
        return req_id

    def step(self):
        """Runs a round of EngineCore.step_with_batch_queue, or of step."""
        depth = 2 if self.ahead else 1
        if self.scheduler.has_requests():
            step = self.scheduler.schedule()
            step = replace(step, kv_connector_metadata=sent(step.kv_connector_metadata))
            output = self.runner.execute_model(step)
            if step.total_num_scheduled_tokens:
                assert output is None
                output = self.runner.sample_tokens(None)
            else:
                time.sleep(0.001)  # as EngineCore does, to not outrun the disk threads
            self._in_flight.append((step, output))
            if len(self._in_flight) < depth:
                return
        elif not self._in_flight:
            return
        self.update()

    def update(self):
        """Passes the oldest step's results to the scheduler."""
        step, output = self._in_flight.popleft()
        if isinstance(output, AsyncModelRunnerOutput):
            output = output.get_output()
        output.kv_connector_output = sent(output.kv_connector_output)
        results = self.scheduler.update_from_output(step, output)
        for result in (r for of_client in results.values() for r in of_client.outputs):
            self.outputs[result.request_id] += result.new_token_ids
            if result.finish_reason is not None:
                assert result.request_id not in self.ended
                self.ended[result.request_id] = str(result.finish_reason)

    def abort(self, req_id):
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
        self.ended.setdefault(req_id, "abort")

    def run(self, most_steps=20_000):
        """Runs until nothing is left to do."""
        for _ in range(most_steps):
            if not self.scheduler.has_requests() and not self._in_flight:
                return
            self.step()
        raise AssertionError(f"hangs: {self.scheduler.requests}")

    def generate(self, prompt, **options):
        req_id = self.add(prompt, **options)
        self.run()
        return req_id

    def check(self):
        """Checks that nothing is wrong or held; call it when idle."""
        for req_id, tokens in self.outputs.items():
            text = self.texts[req_id]
            start = text.num_prompt_tokens
            assert tokens == [text.token(start + i) for i in range(len(tokens))], req_id
            assert req_id in self.ended
        scheduler, connector = self.scheduler, self.connector.scheduler
        assert not scheduler.requests and not scheduler.deferred_frees
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert not connector._jobs and not connector._req_status
        assert not connector._block_id_to_pending_jobs and not connector._chunks_being_loaded
        assert connector.manager.is_idle
        assert not self.hooks.store_jobs.busy and not self.hooks.load_jobs.busy
        assert not scheduler.failed_recving_kv_req_ids
        assert not scheduler.finished_recving_kv_req_ids

    def check_disk(self, *before):
        """Checks that every page on disk matches its text; returns the number of pages.

        Args:
            before: earlier engines that wrote there.
        """
        expected = {}
        for engine in (self, *before):
            for req_id, hashes in engine.hashes.items():
                for index, block_hash in enumerate(hashes):
                    expected[block_hash.hex()] = (engine.texts[req_id], index)
        count = 0
        for path in sorted(self.folder.glob("*/*/*/*.kv")):
            key = bytes.fromhex(path.stem)
            text, index = expected[key[:-4].hex()]
            content = bytearray(BLOCK * 4)
            if not folder_of(self.store, path.parts[-3]).read(key, memoryview(content)):
                continue  # corrupted
            group = int.from_bytes(key[-4:], "big")
            np.testing.assert_array_equal(
                np.frombuffer(content, np.float32),
                text.kv(group, index * BLOCK, (index + 1) * BLOCK),
            )
            count += 1
        return count

    def counter(self, name):
        return getattr(self.disk.stats(), name)

    def close(self):
        try:
            self.runner.close()
        finally:
            self.hooks.close()
            self.connector.shutdown()


def prompts(rng, num_families=3, longest=200):
    """Draws prompts that share prefixes."""
    families = [rng.integers(0, 90, longest).tolist() for _ in range(num_families)]
    while True:
        family = families[int(rng.integers(num_families))]
        shared = int(rng.integers(0, len(family)))
        own = rng.integers(0, 90, int(rng.integers(1, 40))).tolist()
        yield family[:shared] + own
