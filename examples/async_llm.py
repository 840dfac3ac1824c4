# SPDX-License-Identifier: Apache-2.0
"""Streams several answers at once without a server, and cancels one of them."""

import argparse
import asyncio
from typing import TYPE_CHECKING

import _common
import _terminal

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

QUESTIONS = {
    "Rome": "What is Rome known for? Answer in one sentence.",
    "Oslo": "What is Oslo known for? Answer in one sentence.",
    "story": "Tell a long story about a lighthouse.",
}
CANCELLED, AFTER = "story", 5  # request to cancel, after this many pieces


async def answer(engine: "AsyncLLM", name: str, max_tokens: int, pieces: list[str]) -> None:
    """Asks one question; appends each piece of the answer to `pieces`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompt = engine.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": QUESTIONS[name]}], tokenize=False, add_generation_prompt=True
    )
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA
    )
    async for output in engine.generate(prompt, params, request_id=name):
        pieces.append(output.outputs[0].text)
        _terminal.stream(f"{name}:{pieces[-1]!r} ")


async def answer_all(engine: "AsyncLLM", max_tokens: int) -> dict[str, list[str]]:
    """Asks all questions at once; returns the pieces of their answers."""
    pieces: dict[str, list[str]] = {name: [] for name in QUESTIONS}
    tasks = {
        name: asyncio.create_task(answer(engine, name, max_tokens, pieces[name]))
        for name in QUESTIONS
    }
    while len(pieces[CANCELLED]) < AFTER and not tasks[CANCELLED].done():
        await asyncio.sleep(0.01)
    tasks[CANCELLED].cancel()  # the engine stops computing it and frees its memory
    done = await asyncio.gather(*tasks.values(), return_exceptions=True)
    for error in done:
        if isinstance(error, Exception):  # CancelledError is not an Exception
            raise error
    return pieces


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="directory or Hub name; default: the embedded model")
    parser.add_argument("--max-tokens", type=int, default=40, help="longest answer")
    args = parser.parse_args()
    _common.prepare(offline=args.model is None)
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=args.model or str(_common.default_model()),
            max_model_len=1024,
            max_num_seqs=len(QUESTIONS),
            enable_prefix_caching=True,
            kv_cache_memory_bytes=int(_common.DEFAULT_KV_CACHE_GIB * 2**30),
        )
    )
    try:
        pieces = await answer_all(engine, args.max_tokens)
    finally:
        engine.shutdown()
    for name, question in QUESTIONS.items():
        _terminal.say(f"\n{question}", "bold")
        print("".join(pieces[name]).strip())
        end = "cancelled" if name == CANCELLED else "whole"
        _terminal.say(f"{len(pieces[name])} pieces, {end}", "dim")


if __name__ == "__main__":  # the engine is a child process that imports this file
    asyncio.run(main())
