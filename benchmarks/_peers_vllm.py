# SPDX-License-Identifier: Apache-2.0
"""Serves with vLLM in its own process, on this platform or on vLLM's CPU backend.

VLLM_METAL_DEVICE=off selects vLLM's own platforms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _peers_process import Recorder, Run, answer_commands


class VllmPeer:
    """vLLM's engine, driven as by `LLM.generate`."""

    def __init__(self, **options: Any) -> None:
        """
        Args:
            options: arguments of `LLM`.
        """
        from vllm import LLM
        from vllm.platforms import current_platform

        self._llm = LLM(skip_tokenizer_init=True, enable_prefix_caching=True, seed=0, **options)
        self._engine = self._llm.llm_engine
        self.about = {"platform": type(current_platform).__name__}

    def forget(self) -> None:
        """Clears the prefix cache."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset")

    def run(self, prompts: Sequence[list[int]], max_tokens: int) -> Run:
        """Answers requests that are sent at once."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        recorder = Recorder(len(prompts))
        for number, prompt in enumerate(prompts):
            self._engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                recorder.note(int(output.request_id), output.outputs[0].token_ids)
        return recorder.run()


if __name__ == "__main__":
    answer_commands(VllmPeer)
