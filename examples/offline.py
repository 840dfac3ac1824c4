# SPDX-License-Identifier: Apache-2.0
"""Answers a batch of prompts without a server; their shared system prompt is computed once."""

import argparse

import _common
import _terminal

SYSTEM = (
    "You are a helpful assistant for travelers. Answer in one short sentence. "
    "Use plain words, give no lists, and do not repeat the question."
)
QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Japan?",
    "What language do people speak in Italy?",
    "What is the capital of Germany?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="directory or Hub name; default: the embedded model")
    parser.add_argument("--max-tokens", type=int, default=40, help="longest answer")
    args = parser.parse_args()
    _common.prepare(offline=args.model is None)
    from vllm import LLM, SamplingParams
    from vllm.renderers.chat_utils import ChatCompletionMessageParam

    llm = LLM(
        model=args.model or str(_common.default_model()),
        max_model_len=1024,
        max_num_seqs=len(QUESTIONS),
        enable_prefix_caching=True,
        kv_cache_memory_bytes=int(_common.DEFAULT_KV_CACHE_GIB * 2**30),
    )
    conversations: list[list[ChatCompletionMessageParam]] = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        for question in QUESTIONS
    ]
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    for question, output in zip(QUESTIONS, llm.chat(conversations, params), strict=True):
        _terminal.say(f"\n{question}", "bold")
        print(output.outputs[0].text.strip())
        prompt, cached = len(output.prompt_token_ids or ()), output.num_cached_tokens or 0
        _terminal.say(f"{prompt} prompt tokens, {cached} from the prefix cache", "dim")


if __name__ == "__main__":  # the engine may be a child process that imports this file
    main()
