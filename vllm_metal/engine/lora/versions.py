# SPDX-License-Identifier: Apache-2.0
"""Resolves an adapter's id to the content it stands for, in the scheduler's process.

vLLM identifies adapters by the clients' ids, and their K/V by name and path, but an adapter may be
retrained without a change of these. Here a request gets, on arrival, the digest of its adapter's
files and an id derived from it. The scheduler counts adapters by that id, blocks are hashed with
it, and the worker applies exactly that content or fails the request.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from vllm.lora.request import LoRARequest

from vllm_metal.engine.lora.files import AdapterFiles

_DIGITS = 15  # hex digits of a content id, which stays below 2^60


class AdapterRequest(LoRARequest, omit_defaults=True, array_like=True):
    """A LoRARequest with known content; `lora_int_id` is derived from the content."""

    digest: str = ""  # see AdapterFiles.digest
    asked_id: int = 0  # the client's id, used to unload and pin


@dataclass(frozen=True)
class _Version:
    stamp: tuple[tuple[int, int, int], ...]  # see AdapterFiles.stamp
    digest: str


class Versions:
    """Digests of the current files of an engine's adapters, by the clients' ids and the paths."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Version] = {}  # by the client's id and the path
        self._lock = threading.Lock()  # requests arrive on another thread

    def of(self, request: LoRARequest, anew: bool = False) -> AdapterRequest:
        """Returns the request with the digest that its adapter had when first loaded or used.

        With `request.load_inplace`, checks the files again; `anew` re-reads even files whose stamp
        is unchanged. Raises what AdapterFiles.find does.
        """
        key = request.lora_int_id, request.lora_path
        with self._lock:
            known = self._known.get(key)
            if known is None or request.load_inplace:
                files = AdapterFiles.find(request.lora_name, request.lora_path)
                stamp = files.stamp()
                if anew or known is None or known.stamp != stamp:
                    known = self._known[key] = _Version(stamp, files.digest())
        return AdapterRequest(
            lora_name=request.lora_name,
            lora_int_id=int(known.digest[:_DIGITS], 16) + 1,
            lora_path=request.lora_path,
            base_model_name=request.base_model_name,
            load_inplace=request.load_inplace,
            digest=known.digest,
            asked_id=request.lora_int_id,
        )

    def forget(self, asked_id: int) -> None:
        """Discards the digest of the client's adapter; its next request reads the files again."""
        with self._lock:
            for key in [key for key in self._known if key[0] == asked_id]:
                del self._known[key]


def of_content(request: LoRARequest) -> AdapterRequest:
    """Returns a request with its adapter's digest; computes it if it is unknown."""
    if isinstance(request, AdapterRequest):
        return request
    return Versions().of(request)
