# SPDX-License-Identifier: Apache-2.0
"""Answers questions about this project's pages, and prints the cached share of each prompt.

Passages come first in the prompt, in the order they were found: the next question finds their K/V
in the prefix cache, and only new passages are computed.
"""

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import _server

DOCUMENTS = Path(__file__).resolve().parents[1] / "docs"
QUESTIONS = (
    "What does a restart of the server do to the K/V of a prompt?",
    "After a crash, are blocks read from the SSD or computed again?",
    "What keeps tenants apart?",
)
INSTRUCTIONS = "Answer in one short sentence, from these passages only."
_LONGEST = 500  # characters per passage


@dataclass(frozen=True)
class Passage:
    """A paragraph of a page."""

    page: str
    text: str


class Retriever:
    """Finds passages by keywords: BM25 (Robertson and Zaragoza 2009)."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        """Indexes the passages."""
        self._passages = passages
        self._counts = [Counter(_words(f"{each.page} {each.text}")) for each in passages]
        self._mean = sum(map(Counter.total, self._counts)) / len(passages)
        self._having = Counter(word for counts in self._counts for word in counts)

    def find(self, question: str, most: int) -> list[Passage]:
        """Returns the passages that match a question best, best first."""
        words = set(_words(question))
        scores = [self._score(words, counts) for counts in self._counts]
        order = sorted(range(len(scores)), key=lambda at: -scores[at])
        return [self._passages[at] for at in order[:most]]

    def _score(
        self, words: set[str], counts: Counter[str], k: float = 1.2, b: float = 0.75
    ) -> float:
        length = 1 - b + b * counts.total() / self._mean
        rare = {
            word: math.log(1 + (len(self._passages) - n + 0.5) / (n + 0.5))
            for word in words
            if (n := self._having[word])
        }
        return sum(
            rarity * counts[word] * (k + 1) / (counts[word] + k * length)
            for word, rarity in rare.items()
        )


def passages(folder: Path) -> list[Passage]:
    """Returns the paragraphs of a folder's Markdown pages, without tables, lists and code."""
    found = [
        Passage(page.stem, " ".join(paragraph.split())[:_LONGEST])
        for page in sorted(folder.glob("*.md"))
        for paragraph in page.read_text().split("\n\n")
        if len(paragraph) > 80 and paragraph[0].isalpha()
    ]
    if not found:
        raise SystemExit(
            f"{folder} has no Markdown files: pass a folder that has some with --documents"
        )
    return found


def prompt(known: Sequence[Passage], question: str) -> str:
    """Makes a prompt with the passages first and the question, which changes, last."""
    texts = "\n\n".join(f"[{each.page}] {each.text}" for each in known)
    return f"{INSTRUCTIONS}\n\n{texts}\n\nQuestion: {question}"


def main(args: argparse.Namespace) -> None:
    client, model = _server.openai_client(args)
    retriever = Retriever(passages(args.documents))
    known: list[Passage] = []
    total, cached = 0, 0  # prompt tokens
    for question in args.question or QUESTIONS:
        found = retriever.find(question, args.passages)
        known += [each for each in found if each not in known]  # append only, to keep the prefix
        known = known if len(known) <= args.most else found
        print(f"\n> {question}\n  from {', '.join(each.page for each in found)}")
        reply = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt(known, question)}],
            max_tokens=args.max_tokens,
            temperature=0,
        )
        print((reply.choices[0].message.content or "").strip())
        used = reply.usage
        details = used.prompt_tokens_details if used else None
        if used is None or details is None or details.cached_tokens is None:
            print("(start the server with --enable-prompt-tokens-details to see what was cached)")
            continue
        print(f"({_share(used.prompt_tokens, details.cached_tokens)})")
        total, cached = total + used.prompt_tokens, cached + details.cached_tokens
    if total:
        print(f"\nAll together: {_share(total, cached)}.")


def _share(tokens: int, cached: int) -> str:
    return f"{tokens} prompt tokens, {cached / tokens:.0%} of them cached"


def _words(text: str) -> list[str]:
    """Returns lower-case words without plural s."""
    return [word.removesuffix("s") for word in re.findall(r"[a-z0-9_]+", text.lower())]


if __name__ == "__main__":
    options = _server.parser((__doc__ or "").partition("\n")[0])
    options.add_argument("question", nargs="*", help="default: three about this project")
    options.add_argument("--documents", type=Path, default=DOCUMENTS, help="folder of *.md")
    options.add_argument("--passages", type=int, default=2, help="passages found for a question")
    options.add_argument("--most", type=int, default=12, help="passages kept in the prompt")
    options.add_argument("--max-tokens", type=int, default=40, help="longest answer")
    sys.exit(_server.run(main, options.parse_args()))
