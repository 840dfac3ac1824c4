# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side of the connector and the worker's tell each other, all of it picklable.

Down, with each step: `TransferMetadata`. Up, with its result: `TransferUpdate`; and once, at the
start: `TransferHandshake`. Stores' own words go along in them, by the store's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import LoadStoreSpec

if TYPE_CHECKING:
    from vllm_metal.identity.fingerprint import PoolContent
    from vllm_metal.kv_transfer.shared_pool import PinChanges
    from vllm_metal.kv_transfer.wake_event import WakeEvent
    from vllm_metal.patches.vllm_patches.cached_blocks import CacheChanges


@dataclass
class PageKeys(LoadStoreSpec):
    """The pages of a job, one for each block, in the order of the job's blocks."""

    keys: list[bytes]  # block hash and KV cache group, see vLLM's make_offload_key
    ends: list[int]  # how many tokens of the text a page completes
    namespace: str | None  # whose they are, see `salts.namespace`
    used_at: float  # seconds since the epoch: when the request came
    hints: Mapping[str, Any] = field(default_factory=dict)  # of a load, by store


@dataclass(frozen=True)
class Ended:
    """A job that has ended, well or not; where a load failed, its request computes its tokens."""

    job_id: int
    req_id: str
    num_bytes: int = 0
    seconds: float = 0.0
    failed: bool = False
    #: Blocks that a load which failed did not fill, where the first of the request's was; else the
    #: request begins from nothing.
    missing_blocks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Use:
    """Pages of a text, from its first block on, that a request begins with."""

    namespace: str | None
    keys: list[bytes]
    at: float  # seconds since the epoch


@dataclass(frozen=True)
class Discard:
    """Pages of a request that failed: nobody may be served from them."""

    number: int  # told back when they are gone
    namespace: str | None
    keys: frozenset[bytes]


@dataclass
class TransferMetadata(OffloadingConnectorMetadata):
    """A step's jobs, and what became void since the step before."""

    #: Requests whose blocks hold nothing worth keeping: their stores are to be dropped.
    void_requests: frozenset[str] = frozenset()
    #: Requests whose loads are to end: their blocks belong to others from this step on.
    cancelled_loads: frozenset[str] = frozenset()
    discards: list[Discard] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    #: Whether the scheduler's side must know what pages are: other weights may have been loaded.
    asks_content: bool = False
    #: What the pool's blocks hold from this step on, if others may have that; None: as before.
    cached: CacheChanges | None = None


@dataclass
class TransferUpdate(OffloadingWorkerMetadata):
    """Jobs that ended since the step before, and what else the scheduler's side must know."""

    content: PoolContent | None = None  # what pages are now; None: not asked, and as before
    discarded: list[int] = field(default_factory=list)  # numbers of discards that are done
    stores: dict[str, Any] = field(default_factory=dict)  # news by store
    #: Requests that go on with the first part of a load which failed.
    loaded_in_part: set[str] = field(default_factory=set)
    pins: PinChanges | None = None  # None: as before


@dataclass
class TransferHandshake(KVConnectorHandshakeMetadata):
    """What the scheduler's side makes its views of the stores from, beside the settings."""

    content: PoolContent
    stores: dict[str, Any]  # handshakes by store
    bell: WakeEvent | None = None  # rung where pages of the pool are wanted; None: they never are
