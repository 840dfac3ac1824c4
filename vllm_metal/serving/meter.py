# SPDX-License-Identifier: Apache-2.0
"""Counts every token that the engine computes for a tenant, from the engine's outputs.

Responses do not suffice: a client may hang up before the usage, not ask for it, or get its response
in the background.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_metal.serving.metrics import ServerMetrics
from vllm_metal.serving.tenants_file import Key
from vllm_metal.settings import salts

if TYPE_CHECKING:
    from prometheus_client import Counter
    from vllm.v1.engine import EngineCoreOutput

#: Aborted requests may still get outputs of running steps, and nothing marks the last one. So the
#: newest are remembered: many more than an engine has at once.
MAX_ABORTED = 65536


@dataclass(frozen=True)
class _Account:
    prompt: Counter
    cached: Counter
    completion: Counter


class Meter:
    """Counts tokens by tenant, identified by a request's salt. Belongs to one event loop."""

    def __init__(self, metrics: ServerMetrics, secret: bytes) -> None:
        """`secret`: the secret from which salts are derived."""
        self._metrics, self._secret = metrics, secret
        self._by_namespace: dict[str | None, _Account] = {}
        self._introduced: set[str] = set()
        # By the engine's request ids.
        self._running: dict[str, _Account] = {}
        self._aborted: dict[str, _Account] = {}

    def introduce(self, key: Key, salt: str) -> None:
        """Maps a tenant's salts to its counters; call it before its request enters the engine.

        `salt`: a salt that the server derived for any request of the tenant.
        """
        if key.identity not in self._introduced:
            self._introduced.add(key.identity)
            self._by_namespace[salts.namespace(self._secret, salt)] = _Account(
                *(
                    self._metrics.tokens.labels(key.tenant, kind)
                    for kind in ("prompt", "cached", "completion")
                )
            )

    def begin(self, request_id: str, salt: str | None) -> None:
        """Assigns a request that enters the engine to its tenant."""
        account = self._by_namespace.get(salts.namespace(self._secret, salt))
        if account is not None:
            self._running[request_id] = account

    def take(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Counts a step's outputs; prompt tokens once, when the whole prompt is computed."""
        for output in outputs:
            name = output.request_id
            account = self._running.get(name) or self._aborted.get(name)
            if account is None:
                continue
            if (prefill := output.prefill_stats) is not None:
                account.prompt.inc(prefill.num_prompt_tokens)
                account.cached.inc(prefill.num_cached_tokens)
            if output.new_token_ids:
                account.completion.inc(len(output.new_token_ids))
            if output.finish_reason is not None:
                self._running.pop(name, None)
                self._aborted.pop(name, None)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Marks requests as aborted; they may still get outputs of running steps."""
        for name in request_ids:
            if (account := self._running.pop(name, None)) is not None:
                self._aborted[name] = account
        while len(self._aborted) > MAX_ABORTED:
            del self._aborted[next(iter(self._aborted))]
