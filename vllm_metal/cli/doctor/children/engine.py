# SPDX-License-Identifier: Apache-2.0
"""Runs an engine in this process, as a user's script does: load, generate, shut down.

python -m vllm_metal.cli.doctor.children.engine MODEL [--timed [--pool BYTES]]

Generates ten tokens; with --timed, times prefill, decode, and a step after an idle device.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

from vllm_metal.cli.doctor.engine import KV_CACHE_BYTES, NUM_TOKENS, PROMPT
from vllm_metal.device.child import send_message

if TYPE_CHECKING:
    from vllm import LLM

#: Tokens of a timed prompt and its answer; fewer if the model's context is shorter.
_PROMPT, _ANSWER = 512, 64
_IDLE_SECONDS = 3.0
#: Tokens in which the effect of a pause shows. A step is submitted before the tokens of the one
#: before are read, so the first token after a pause was computed before it; the next ones come from
#: steps after it.
_BEHIND_PAUSE = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--timed", action="store_true", help="measure times, not ten tokens")
    parser.add_argument("--pool", type=int, help="bytes of the KV cache; default: vLLM's own")
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    send_message(stage="starting")
    from vllm import LLM

    send_message(stage="loading the model")
    options: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_memory_bytes": KV_CACHE_BYTES}
    if args.timed:
        options = {"enable_prefix_caching": False}
        options |= {} if args.pool is None else {"kv_cache_memory_bytes": args.pool}
    llm = LLM(args.model, max_model_len=-1, **options)
    (_time if args.timed else _answer)(llm)
    send_message(stage="shutting down")
    del llm
    gc.collect()
    send_message(stage="leaving")


def _answer(llm: LLM) -> None:
    from vllm import SamplingParams

    send_message(stage="answering")
    asked = time.monotonic()
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (output,) = llm.generate([PROMPT], greedy, use_tqdm=False)
    completion = output.outputs[0]
    send_message(
        prompt=list(output.prompt_token_ids or ()),
        tokens=list(completion.token_ids),
        text=completion.text,
        answer_seconds=round(time.monotonic() - asked, 3),
    )


def _time(llm: LLM) -> None:
    import mlx.core as mx  # not before vLLM: the plugin loads a BLAS for it

    config = llm.llm_engine.vllm_config
    longest = config.model_config.max_model_len
    num_prompt, num_answer = min(_PROMPT, longest // 2), min(_ANSWER, longest // 4)
    num_blocks = config.cache_config.num_gpu_blocks
    assert num_blocks is not None  # set once the pool is there
    send_message(
        pool_tokens=num_blocks * config.cache_config.block_size,
        active_bytes=mx.get_active_memory(),
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        num_prompt=num_prompt,
        num_answer=num_answer,
    )
    send_message(stage="answering")
    _gaps(llm, "first", num_prompt, num_answer)  # warm-up: compiles
    gaps = _gaps(llm, "timed", num_prompt, num_answer)
    send_message(prefill=num_prompt / gaps[0], decode=(len(gaps) - 1) / sum(gaps[1:]))
    paused_after = num_answer // 2
    gaps = _gaps(llm, "paused", num_prompt, num_answer, paused_after)
    send_message(
        idle_seconds=_IDLE_SECONDS,
        step_seconds=statistics.median(gaps[1:paused_after]),
        step_after_idle_seconds=max(gaps[paused_after : paused_after + _BEHIND_PAUSE]),
    )


def _gaps(
    llm: LLM, name: str, num_prompt: int, num_answer: int, paused_after: int | None = None
) -> list[float]:
    """Returns the seconds before each token of a request, since the previous one or the start.

    After `paused_after` tokens, sleeps for _IDLE_SECONDS, which are not counted.
    """
    from vllm import SamplingParams

    engine: Any = llm.llm_engine
    greedy = SamplingParams(temperature=0, max_tokens=num_answer, ignore_eos=True)
    # Ids that are in every vocabulary, including the tiny model's 64 words.
    prompt = [5 + index * 7 % 50 for index in range(num_prompt)]
    before = time.perf_counter()
    engine.add_request(name, {"prompt_token_ids": prompt}, greedy)
    gaps: list[float] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if len(output.outputs[0].token_ids) > len(gaps):
                gaps.append(time.perf_counter() - before)
                if len(gaps) == paused_after:
                    time.sleep(_IDLE_SECONDS)
                before = time.perf_counter()
    return gaps


if __name__ == "__main__":
    main()
