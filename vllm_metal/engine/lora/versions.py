# SPDX-License-Identifier: Apache-2.0
"""Says which content an adapter's id stands for, in the process that schedules.

vLLM keeps adapters apart by the numbers that its clients give, and K/V by name and path. An adapter
may be trained anew under all three. Here a request gets the digest of its adapter's files when it
arrives, and its number is made from the digest: the scheduler counts by it, blocks are hashed with
it, and the worker applies exactly that content or fails the request.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from vllm.lora.request import LoRARequest

from vllm_metal.engine.lora.files import AdapterFiles

_DIGITS = 15  # hex, of a content's number: it stays below 2^60


class AdapterRequest(LoRARequest, omit_defaults=True, array_like=True):
    """A LoRARequest whose content is known; `lora_int_id` is the content's number."""

    digest: str = ""  # see AdapterFiles.digest
    asked_id: int = 0  # the client's number, by which it unloads and pins


@dataclass(frozen=True)
class _Version:
    stamp: tuple[tuple[int, int, int], ...]  # see AdapterFiles.stamp
    digest: str


class Versions:
    """The contents that an engine's adapters stand for."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Version] = {}  # by the client's number, and path
        self._lock = threading.Lock()  # requests arrive in a thread of their own

    def of(self, request: LoRARequest, anew: bool = False) -> AdapterRequest:
        """The request with the content that its adapter has now.

        That is what was there when the adapter was loaded or used first, until it is forgotten.
        With `load_inplace` it is what is there now.

        Args:
            request: a client's.
            anew: whether to read files that look unchanged, too.

        Raises:
            LoRAAdapterNotFoundError, AdapterError: see AdapterFiles.find.
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
        """Has the next request of an adapter read its files again."""
        with self._lock:
            for key in [key for key in self._known if key[0] == asked_id]:
                del self._known[key]


def of_content(request: LoRARequest) -> AdapterRequest:
    """The request with its content, which is looked up where that is not known yet."""
    if isinstance(request, AdapterRequest):
        return request
    return Versions().of(request)
