# SPDX-License-Identifier: Apache-2.0
"""Asks a multimodal model about a picture (docs/images.md)."""

import argparse
import base64
import mimetypes
import sys
from pathlib import Path

import _server


def main(args: argparse.Namespace) -> None:
    client, model = _server.openai_client(args)
    if not args.picture.is_file():
        sys.exit(f"there is no file {args.picture}")
    kind = mimetypes.guess_type(args.picture.name)[0] or "image/png"
    content = base64.b64encode(args.picture.read_bytes()).decode()
    chunks = client.chat.completions.create(
        model=model,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{content}"}},
                    {"type": "text", "text": args.question},
                ],
            }
        ],
        max_tokens=args.max_tokens,
        stream=True,
    )
    for chunk in chunks:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    parser = _server.parser(__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("question", nargs="?", default="What is in this picture?")
    parser.add_argument("--max-tokens", type=int, default=200)
    sys.exit(_server.run(main, parser.parse_args()))
