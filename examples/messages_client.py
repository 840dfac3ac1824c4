# SPDX-License-Identifier: Apache-2.0
"""Uses the Messages API with Anthropic's client: token counting, streaming, a second turn."""

import argparse
import sys

import _server
import anthropic
from anthropic.types import MessageParam

SYSTEM = "You are a helpful assistant for travelers. Answer in one short sentence."
QUESTIONS = ("What is the capital of Norway?", "Which language do people speak there?")


def main(args: argparse.Namespace) -> None:
    client = anthropic.Anthropic(base_url=args.server, api_key=args.api_key, max_retries=0)
    model = client.models.list().data[0].id
    messages: list[MessageParam] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        counted = client.messages.count_tokens(model=model, system=SYSTEM, messages=messages)
        print(f"\n> {question} ({counted.input_tokens} tokens with all before it)")
        with client.messages.stream(
            model=model,
            system=SYSTEM,
            messages=messages,
            max_tokens=args.max_tokens,
            extra_body={"temperature": 0},  # this client has no such argument
        ) as stream:
            for text in stream.text_stream:
                print(text, end="", flush=True)
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        used = message.usage
        print(f"\n({used.input_tokens} tokens computed, {used.cache_read_input_tokens} cached)")


if __name__ == "__main__":
    options = _server.parser(__doc__)
    options.add_argument("--max-tokens", type=int, default=24, help="longest answer")
    sys.exit(_server.run(main, options.parse_args(), anthropic))
