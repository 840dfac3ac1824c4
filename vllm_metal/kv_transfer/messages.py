# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side of the connector and the worker's tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Event

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.v1.kv_offload.base import LoadStoreSpec

from vllm_metal.kv_transfer.peers import Asked


@dataclass(frozen=True)
class RequestPlace:
    """Where a request's pages are kept."""

    namespace: str | None  # a folder on disk; None: they are not kept there
    used_at: float  # seconds since the epoch: when the request came
    asked: Asked | None = None  # what peers have of it; None: they were not asked
    failed_loads: int = 0


@dataclass
class PageKeys(LoadStoreSpec):
    """The pages of a job, one for each block, in the order of the job's blocks."""

    keys: list[bytes]  # block hash and KV cache group, see vLLM's make_offload_key
    ends: list[int]  # how many tokens of the text a page completes
    place: RequestPlace


@dataclass(frozen=True)
class Discard:
    """Pages of a request that failed: nobody may be served from them."""

    namespace: str | None  # see RequestPlace
    keys: frozenset[bytes]
    done: Event = field(default_factory=Event)  # set when they are gone


@dataclass
class TransferMetadata(OffloadingConnectorMetadata):
    """A step's jobs, and what became void since the step before."""

    #: Requests whose blocks hold nothing worth keeping: their stores are to be dropped.
    void_requests: frozenset[str] = frozenset()
    #: Requests whose loads are to end: their blocks belong to others from this step on.
    cancelled_loads: frozenset[str] = frozenset()
    discards: list[Discard] = field(default_factory=list)
