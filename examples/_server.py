# SPDX-License-Identifier: Apache-2.0
"""Helpers of the client examples: server options, and an error if it does not answer."""

import argparse
import os
import sys
from collections.abc import Callable
from types import ModuleType

import openai

NO_SERVER = """\
No server answers at {server}. Start one in another terminal, on a Mac:
  vllm serve "$(vllm-metal model)" --kv-cache-memory-bytes 1G
or on MLX's CPU backend:
  VLLM_METAL_DEVICE=cpu vllm serve "$(vllm-metal model --dequantize)" --kv-cache-memory-bytes 1G"""


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the clients' common options: server and key."""
    made = argparse.ArgumentParser(description=description)
    server = os.environ.get("SERVER_URL", "http://127.0.0.1:8000")
    made.add_argument("--server", default=server, help="default: SERVER_URL, or %(default)s")
    made.add_argument("--api-key", default="none", help="the key given to vllm serve --api-key")
    return made


def openai_client(args: argparse.Namespace) -> tuple[openai.OpenAI, str]:
    """Returns a client and the name of the server's model."""
    client = openai.OpenAI(base_url=f"{args.server}/v1", api_key=args.api_key, max_retries=0)
    return client, client.models.list().data[0].id


def run(
    example: Callable[[argparse.Namespace], None],
    args: argparse.Namespace,
    client: ModuleType = openai,
) -> int:
    """Runs an example.

    Args:
        example: the function that sends requests.
        args: the parsed command line.
        client: the client package, for its error classes.

    Returns:
        The exit status: 1 if the server does not answer or rejects a request.
    """
    try:
        example(args)
    except client.APIConnectionError:
        print(NO_SERVER.format(server=args.server), file=sys.stderr)
        return 1
    except client.APIStatusError as error:
        print(f"The server refused a request: {error}", file=sys.stderr)
        return 1
    return 0
