# SPDX-License-Identifier: Apache-2.0
"""A process that serves with mlx-lm: from Python, or by its own server."""

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
# The same BLAS as this project's engine has; it comes before MLX.
_blas = blas.load() if _on_cpu else None

import mlx.core as mx  # noqa: E402

if _on_cpu:
    mx.set_default_device(mx.cpu)  # before mlx-lm makes its stream

from mlx_lm.generate import BatchGenerator, stream_generate  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402


class MlxLmPeer:
    """mlx-lm's own loops: `stream_generate` for one request, that of `batch_generate` for more."""

    def __init__(self, model: str, batch_options: dict[str, int]) -> None:
        """
        Args:
            model: folder or name on the Hub.
            batch_options: of `batch_generate`.
        """
        from mlx_lm import load

        self._model, self._tokenizer = load(model)
        self._tokenizer.eos_token_ids = []  # answers have the length that was asked for
        self._batch_options = batch_options
        self.about = {"blas": _blas, "device": str(mx.default_device())}

    def run(self, prompts: Sequence[list[int]], max_tokens: int, shared: int = 0) -> Run:
        """Answers to requests that are sent at once.

        Args:
            prompts: by request.
            max_tokens: of an answer.
            shared: so many first tokens, which all prompts share, were computed beforehand. Their
                K/V are handed over with each prompt, for mlx-lm does not look for them itself.
        """
        cache = self._computed(prompts[0][:shared]) if shared else None
        recorder = Recorder(len(prompts))
        if len(prompts) == 1 and cache is None:
            for reply in stream_generate(self._model, self._tokenizer, prompts[0], max_tokens):
                recorder.note(0, [reply.token])
            return recorder.run()
        # The loop of batch_generate, which says when all is done, but not when a token came.
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
    """mlx-lm's server, with a thread of its own in this process."""

    def __init__(self, model: str, port: int) -> None:
        """
        Args:
            model: folder or name on the Hub.
            port: where it listens, on the loopback.
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
