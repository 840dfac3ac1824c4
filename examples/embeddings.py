# SPDX-License-Identifier: Apache-2.0
"""Finds the passage that answers each question, with vectors from an embedding server."""

import argparse
import math
import sys
from collections.abc import Sequence

import _server

PASSAGES = (
    "The ferry to the island leaves every day at nine and comes back at five.",
    "Bread is baked before dawn; what is left at noon costs half.",
    "The library lends books for four weeks, and films for one.",
)
QUESTIONS = (
    "When does the ferry to the island leave?",
    "What does bread cost at noon?",
    "For how many weeks does the library lend books?",
)


def similarity(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the cosine similarity of two vectors."""
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / lengths


def main(args: argparse.Namespace) -> None:
    """Asks the server once for the passages and once for the questions."""
    client, model = _server.openai_client(args)

    def vectors(texts: Sequence[str]) -> list[list[float]]:
        reply = client.embeddings.create(model=model, input=list(texts), encoding_format="float")
        print(f"{len(texts)} texts, {reply.usage.prompt_tokens} tokens")
        return [each.embedding for each in reply.data]

    passages = vectors(PASSAGES)
    instructed = [f"Instruct: {args.instruction}\nQuery: {question}" for question in QUESTIONS]
    for question, vector in zip(
        QUESTIONS, vectors(instructed if args.instruction else QUESTIONS), strict=True
    ):
        scores = [similarity(vector, passage) for passage in passages]
        best = max(range(len(scores)), key=scores.__getitem__)
        print(f"\n{question}\n  {scores[best]:.3f}  {PASSAGES[best]}")


if __name__ == "__main__":
    parser = _server.parser(__doc__)
    parser.add_argument(
        "--instruction", default="", help="instruction before each question, from the model card"
    )
    arguments = parser.parse_args()
    sys.exit(_server.run(main, arguments))
