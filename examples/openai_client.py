# SPDX-License-Identifier: Apache-2.0
"""Uses `vllm serve` with the OpenAI client: streaming, log-probabilities, JSON with a schema."""

import argparse
import json
import math
import sys

import _server
from openai import OpenAI

COUNTRY = {
    "type": "object",
    "properties": {
        "country": {"type": "string", "maxLength": 30},
        "capital": {"type": "string", "maxLength": 30},
    },
    "required": ["country", "capital"],
    "additionalProperties": False,
}


def main(args: argparse.Namespace) -> None:
    client, model = _server.openai_client(args)
    print(f"model: {model}")
    stream(client, model)
    log_probabilities(client, model)
    by_schema(client, model)


def stream(client: OpenAI, model: str) -> None:
    """Prints an answer while it is generated."""
    print("\nstreaming:")
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            used = chunk.usage
            print(f"\n({used.prompt_tokens} prompt tokens, {used.completion_tokens} answered)")


def log_probabilities(client: OpenAI, model: str) -> None:
    """Prints the most likely tokens at each position of a short completion."""
    print("\nlog-probabilities:")
    reply = client.completions.create(
        model=model, prompt="The capital of Italy is", max_tokens=4, temperature=0, logprobs=3
    )
    found = reply.choices[0].logprobs
    assert found is not None and found.tokens is not None and found.top_logprobs is not None
    for token, top in zip(found.tokens, found.top_logprobs, strict=True):
        others = ", ".join(f"{text!r} {math.exp(value):.1%}" for text, value in top.items())
        print(f"  {token!r:12} of {others}")


def by_schema(client: OpenAI, model: str) -> None:
    """Prints an answer that follows a JSON schema."""
    print("\nJSON by a schema:")
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name a country and its capital, as JSON."}],
        max_tokens=60,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "country", "schema": COUNTRY, "strict": True},
        },
    )
    print(f"  {json.loads(reply.choices[0].message.content or '')}")


if __name__ == "__main__":
    sys.exit(_server.run(main, _server.parser(__doc__).parse_args()))
