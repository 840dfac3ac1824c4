# SPDX-License-Identifier: Apache-2.0
"""Serves with mlx-lm in its own process, by its Python API or its server."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from _peers_process import Recorder, Run, answer_commands

from vllm_metal.device import blas
from vllm_metal.settings import envs

_on_cpu = envs.requested_device() == "cpu"
# The same BLAS as in this project's engine; must be loaded before MLX.
_blas = blas.load() if _on_cpu else None

import mlx.core as mx  # noqa: E402

if _on_cpu:
    mx.set_default_device(mx.cpu)  # before mlx-lm makes its stream

from mlx_lm.generate import BatchGenerator, stream_generate  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402


class MlxLmPeer:
    """mlx-lm's `stream_generate` for one request, and the loop of `batch_generate` for several."""

    def __init__(self, model: str, batch_options: dict[str, int]) -> None:
        """
        Args:
            model: folder or Hub name.
            batch_options: options of `batch_generate`.
        """
        from mlx_lm import load

        self._model, self._tokenizer = load(model)
        self._tokenizer.eos_token_ids = []  # answers then have the requested length
        self._batch_options = batch_options
        self.about = {"blas": _blas, "device": str(mx.default_device())}

    def run(self, prompts: Sequence[list[int]], max_tokens: int, shared: int = 0) -> Run:
        """Answers requests that are sent at once.

        Args:
            prompts: one per request.
            max_tokens: tokens of each answer.
            shared: number of leading tokens shared by all prompts. Their K/V are computed
                beforehand and passed with each prompt, since mlx-lm does not find them itself.
        """
        cache = self._computed(prompts[0][:shared]) if shared else None
        recorder = Recorder(len(prompts))
        if len(prompts) == 1 and cache is None:
            for reply in stream_generate(self._model, self._tokenizer, prompts[0], max_tokens):
                recorder.note(0, [reply.token])
            return recorder.run()
        # batch_generate's loop: the function itself does not report when a token was generated.
        generator = BatchGenerator(self._model, **self._batch_options)
        numbers = generator.insert(
            [prompt[shared:] for prompt in prompts],
            [max_tokens] * len(prompts),
            caches=[cache] * len(prompts) if cache is not None else None,
        )
        places = {number: place for place, number in enumerate(numbers)}
        while replies := generator.next_generated():
            for reply in replies:
                recorder.note(places[reply.uid], [reply.token])
        generator.close()
        return recorder.run()

    def _computed(self, tokens: list[int]) -> list[Any]:
        cache = make_prompt_cache(self._model)
        self._model(mx.array([tokens]), cache=cache)
        mx.eval([layer.state for layer in cache])
        return cache


class MlxLmServerPeer:
    """mlx-lm's server, in a thread of this process."""

    def __init__(self, model: str, port: int) -> None:
        """
        Args:
            model: folder or Hub name.
            port: loopback port.
        """
        from mlx_lm import server

        sys.argv = ["mlx_lm.server", "--model", model, "--port", str(port)]
        sys.argv += ["--log-level", "WARNING"]
        thread = threading.Thread(target=server.main, daemon=True)
        thread.start()
        while not _listens(port):
            if not thread.is_alive():
                raise RuntimeError("mlx-lm's server ended before it listened")
            time.sleep(0.1)
        self.about = {"blas": _blas, "device": str(mx.default_device())}


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def _peer(kind: str, **options: Any) -> object:
    return {"python": MlxLmPeer, "server": MlxLmServerPeer}[kind](**options)


if __name__ == "__main__":
    answer_commands(_peer)
