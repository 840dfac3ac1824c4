# SPDX-License-Identifier: Apache-2.0
"""Uses the Responses API with the OpenAI client: a stream, then a follow-up turn."""

import argparse
import sys

import _server
from openai.types.responses import ResponseInputItemParam

INSTRUCTIONS = "You are a helpful assistant for travelers. Answer in one short sentence."
QUESTIONS = ("What is the capital of France?", "Which river flows through it?")


def main(args: argparse.Namespace) -> None:
    client, model = _server.openai_client(args)
    # The server stores nothing: each turn sends all items and finds their K/V in the prefix cache.
    # With VLLM_ENABLE_RESPONSES_API_STORE=1 it stores them and accepts `previous_response_id`.
    items: list[ResponseInputItemParam] = []
    for question in QUESTIONS:
        print(f"\n> {question}")
        items.append({"role": "user", "content": question})
        with client.responses.stream(
            model=model,
            instructions=INSTRUCTIONS,
            input=items,
            max_output_tokens=args.max_tokens,
            temperature=0,
            store=False,
        ) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    print(event.delta, end="", flush=True)
            response = stream.get_final_response()
        items += [item.to_dict() for item in response.output]
        used = response.usage
        assert used is not None
        cached = used.input_tokens_details.cached_tokens
        print(f"\n({used.input_tokens} tokens, {cached} of them cached)")


if __name__ == "__main__":
    options = _server.parser(__doc__)
    options.add_argument("--max-tokens", type=int, default=24, help="longest answer")
    sys.exit(_server.run(main, options.parse_args()))
