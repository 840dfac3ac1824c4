# SPDX-License-Identifier: Apache-2.0
"""A chat of three turns with the embedded model, which checks its answers and its cache hits.

Nothing touches the network. The exit status is 1 where an answer is wrong or a turn did not find
the turns before it in the prefix cache.
"""

import argparse
import sys
import time
from dataclasses import dataclass

import _common
import _terminal

from vllm_metal.commands.chat.terminal.conversation import (
    AnswerLimits,
    ChatEngine,
    Conversation,
    TurnStats,
    ask,
)


@dataclass(frozen=True)
class ScriptedTurn:
    """A question and a word that a right answer has."""

    question: str
    expected: str


# Each question but the first refers to the turns before it.
SCRIPT = (
    ScriptedTurn("What is the capital of France?", "Paris"),
    ScriptedTurn("What language do they speak there?", "French"),
    ScriptedTurn("And in Italy?", "Italian"),
)
GREEDY = AnswerLimits(max_tokens=40, temperature=0.0)
MAX_MODEL_LEN = 1024
KV_CACHE_GIB = 0.25


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
            engine = ChatEngine(str(model), MAX_MODEL_LEN, KV_CACHE_GIB)
    except ImportError as error:
        _terminal.say(f"demo: {error}", "bold red")
        return 1
    took = time.perf_counter() - started
    where = "the GPU, through Metal" if device == "metal" else "MLX's CPU backend"
    _terminal.say(f"{model.name} on {where}, ready after {took:.0f} s", "dim")
    try:
        return play(engine)
    finally:
        engine.close()


def play(engine: ChatEngine) -> int:
    """Asks the script's questions; returns the exit status."""
    conversation = Conversation()
    turns: list[TurnStats] = []
    wrong: list[str] = []
    for number, turn in enumerate(SCRIPT, 1):
        _terminal.say(f"\nyou> {turn.question}", "bold")
        answer = ask(engine, conversation, turn.question, GREEDY, _terminal.stream)
        print()
        assert answer.stats is not None
        if turn.expected not in answer.text:
            wrong.append(f"turn {number}: no {turn.expected!r} in the answer")
        if turns:
            wrong += missed_hits(number, answer.stats, turns[-1], engine.block_size)
        turns.append(answer.stats)
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


def missed_hits(number: int, now: TurnStats, before: TurnStats, block_size: int) -> list[str]:
    """What is wrong with the cache hits of a turn, given the turn before it.

    Its prompt begins with the whole prompt of the turn before, whose full blocks it must find.
    """
    expected = before.prompt_tokens // block_size * block_size
    if now.cached_tokens >= expected > 0:
        return []
    return [
        f"turn {number}: {now.cached_tokens} prompt tokens cached, at least {expected} expected"
    ]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # it takes none
    sys.exit(main())
