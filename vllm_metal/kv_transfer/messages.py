# SPDX-License-Identifier: Apache-2.0
"""Picklable messages between the scheduler's side of the connector and the worker's.

`TransferMetadata` goes down with each step, `TransferUpdate` up with its result, and
`TransferHandshake` up once, at the start. They carry stores' own messages by store name.
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
    ends: list[int]  # number of the text's tokens up to the end of each page
    namespace: str | None  # see `salts.namespace`
    used_at: float  # arrival of the request, seconds since the epoch
    hints: Mapping[str, Any] = field(default_factory=dict)  # for a load, by store


@dataclass(frozen=True)
class JobResult:
    """A finished or failed job. If a load failed, its request computes the tokens."""

    job_id: int
    req_id: str
    num_bytes: int = 0
    seconds: float = 0.0
    failed: bool = False
    #: Blocks that a failed load left unfilled, if it filled the request's first block; otherwise
    #: empty, and the request starts from nothing.
    missing_blocks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Use:
    """Leading pages of a request's text, to be marked as used."""

    namespace: str | None
    keys: list[bytes]
    at: float  # seconds since the epoch


@dataclass(frozen=True)
class Discard:
    """Pages of a failed request, which must not be served to anyone."""

    number: int  # reported back once they are removed
    namespace: str | None
    keys: frozenset[bytes]


@dataclass
class TransferMetadata(OffloadingConnectorMetadata):
    """A step's jobs, and what became invalid since the step before."""

    #: Requests with invalid blocks: their stores must be dropped.
    invalid_requests: frozenset[str] = frozenset()
    #: Requests whose loads must end: their blocks belong to others from this step on.
    cancelled_loads: frozenset[str] = frozenset()
    discards: list[Discard] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    #: Whether the worker must report its content, since other weights may have been loaded.
    needs_content: bool = False
    #: Changes of the pool's cached blocks before this step, if peers may have them; None: none.
    cached: CacheChanges | None = None


@dataclass
class TransferUpdate(OffloadingWorkerMetadata):
    """Jobs that ended since the step before, and other changes on the worker's side."""

    content: PoolContent | None = None  # current content; None: not asked for, and unchanged
    discarded: list[int] = field(default_factory=list)  # numbers of completed discards
    stores: dict[str, Any] = field(default_factory=dict)  # messages by store
    #: Requests that continue with the first part of a failed load.
    partially_loaded: set[str] = field(default_factory=set)
    pins: PinChanges | None = None  # None: unchanged


@dataclass
class TransferHandshake(KVConnectorHandshakeMetadata):
    """Data from the worker that the scheduler's views of the stores need besides the settings."""

    content: PoolContent
    stores: dict[str, Any]  # handshakes by store
    wake_event: WakeEvent | None = None  # set when peers want pages of the pool; None: they cannot
