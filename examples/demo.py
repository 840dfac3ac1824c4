# SPDX-License-Identifier: Apache-2.0
"""Runs a three-turn chat with the embedded model; checks its answers and cache hits.

Uses no network. The exit status is 1 if an answer is wrong or a turn missed earlier turns
in the prefix cache.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import _common
import _terminal

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.renderers.chat_utils import ChatCompletionMessageParam


@dataclass(frozen=True)
class ScriptedTurn:
    """A question, and a word that the right answer contains."""

    question: str
    expected: str


# Each later question refers to earlier turns.
SCRIPT = (
    ScriptedTurn("What is the capital of France?", "Paris"),
    ScriptedTurn("What language do they speak there?", "French"),
    ScriptedTurn("And in Italy?", "Italian"),
)
MAX_TOKENS = 40  # per answer
MAX_MODEL_LEN = 1024
KV_CACHE_GIB = 0.25


@dataclass(frozen=True)
class TurnStats:
    """Metrics of one turn; times in seconds."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    output_tokens: int
    ttft: float  # from the question to the first token
    decode_time: float  # from the first token to the last

    def cells(self) -> list[str]:
        """Prompt tokens, cached tokens, TTFT in ms and tokens per second, as text."""
        has_speed = self.output_tokens > 1 and self.decode_time > 0
        return [
            str(self.prompt_tokens),
            str(self.cached_tokens),
            f"{1000 * self.ttft:.0f}",
            f"{(self.output_tokens - 1) / self.decode_time:.1f}" if has_speed else "–",
        ]


def main() -> int:
    device = _common.prepare(offline=True)
    if device is None:
        _terminal.say(
            "demo: VLLM_METAL_DEVICE=off turns vllm-metal off; unset it to run the demo", "bold red"
        )
        return 1
    started = time.perf_counter()
    try:
        with _terminal.working("Preparing the embedded model (converted once, then cached)"):
            model = _common.default_model()
        with _terminal.working("Starting vLLM and loading the model"):
            from vllm import LLM

            llm = LLM(
                str(model),
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=1,
                enable_prefix_caching=True,
                kv_cache_memory_bytes=int(KV_CACHE_GIB * 2**30),
                disable_log_stats=False,  # for the times of each answer
            )
    except ImportError as error:
        _terminal.say(f"demo: {error}", "bold red")
        return 1
    took = time.perf_counter() - started
    where = "the GPU, through Metal" if device == "metal" else "MLX's CPU backend"
    _terminal.say(f"{model.name} on {where}, ready after {took:.0f} s", "dim")
    return play(llm)


def play(llm: "LLM") -> int:
    """Runs the script; returns the exit status."""
    block_size = llm.llm_engine.vllm_config.cache_config.block_size
    conversation: list[ChatCompletionMessageParam] = []
    turns: list[TurnStats] = []
    wrong: list[str] = []
    for number, turn in enumerate(SCRIPT, 1):
        _terminal.say(f"\nyou> {turn.question}", "bold")
        conversation.append({"role": "user", "content": turn.question})
        answer, stats = ask(llm, conversation)
        conversation.append({"role": "assistant", "content": answer})
        _terminal.say(answer)
        if turn.expected not in answer:
            wrong.append(f"turn {number}: no {turn.expected!r} in the answer")
        if turns:
            wrong += missed_hits(number, stats, turns[-1], block_size)
        turns.append(stats)
    print()
    _terminal.table(
        ("turn", "prompt tokens", "of these cached", "TTFT ms", "tok/s"),
        [(str(number), *stats.cells()) for number, stats in enumerate(turns, 1)],
    )
    for line in wrong:
        _terminal.say(f"demo: {line}", "bold red")
    if not wrong:
        _terminal.say(
            "All answers are right, and each turn found the turns before it in the prefix cache."
        )
        _terminal.say(
            "This model is a toy of 135 million parameters, to try the engine. For real answers:\n"
            "    .venv/bin/vllm-metal chat mlx-community/Qwen3-4B-Instruct-2507-4bit"
        )
    return 1 if wrong else 0


def ask(llm: "LLM", conversation: "list[ChatCompletionMessageParam]") -> tuple[str, TurnStats]:
    """Returns the answer to a conversation, and its metrics."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    (output,) = llm.chat(conversation, params, use_tqdm=False)
    times, answer = output.metrics, output.outputs[0]
    assert times is not None
    stats = TurnStats(
        len(output.prompt_token_ids or ()),
        output.num_cached_tokens or 0,
        len(answer.token_ids),
        times.first_token_latency,
        times.last_token_ts - times.first_token_ts,
    )
    return answer.text, stats


def missed_hits(number: int, now: TurnStats, before: TurnStats, block_size: int) -> list[str]:
    """Returns the problems with a turn's cache hits, given the previous turn.

    Its prompt begins with the whole previous prompt, so it must find that prompt's full blocks.
    """
    expected = before.prompt_tokens // block_size * block_size
    if now.cached_tokens >= expected > 0:
        return []
    return [
        f"turn {number}: {now.cached_tokens} prompt tokens cached, at least {expected} expected"
    ]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # rejects arguments
    sys.exit(main())
