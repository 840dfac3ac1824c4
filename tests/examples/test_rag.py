# SPDX-License-Identifier: Apache-2.0
"""Retrieval, and positions of passages in the prompt."""

import math

import pytest
from rag import Passage, Retriever, passages, prompt

TEXTS = (
    "The oven heats bread. The oven is hot.",
    "A bakery sells bread and rolls to many people who come early.",
    "Trains leave at noon.",
)
PASSAGES = [Passage("page", text) for text in TEXTS]


def bm25(words, text):
    """The paper's formula with k1 = 1.2 and b = 0.75, over texts without plurals."""
    texts = [f"page {each}".lower().replace(".", "").split() for each in TEXTS]
    mean = sum(map(len, texts)) / len(texts)
    total = 0.0
    for word in words:
        having = sum(word in each for each in texts)
        rarity = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        count = text.count(word)
        weight = count + 1.2 * (0.25 + 0.75 * len(text) / mean)
        total += rarity * count * 2.2 / weight
    return total


@pytest.mark.parametrize("question", ["bread", "oven", "hot bread", "noon", "many bread"])
def test_the_best_passage_is_that_of_the_formula(question):
    texts = [f"page {each}".lower().replace(".", "").split() for each in TEXTS]
    scores = [bm25(question.split(), text) for text in texts]
    best = TEXTS[scores.index(max(scores))]
    assert Retriever(PASSAGES).find(question, 1)[0].text == best


def test_paragraphs_are_passages_and_tables_are_not(tmp_path):
    long = "A paragraph of some length, which goes over\nmore than one line of the page, and ends."
    (tmp_path / "page.md").write_text(f"# Page\n\n{long}\n\n| a table |\n| --- |{' |' * 80}\n")
    assert passages(tmp_path) == [Passage("page", long.replace("\n", " "))]


def test_a_folder_without_pages_is_told(tmp_path):
    with pytest.raises(SystemExit, match="--documents"):
        passages(tmp_path)


def test_prompts_with_more_passages_begin_alike():
    first, second = prompt(PASSAGES[:1], "Why?"), prompt(PASSAGES, "When?")
    head = first.partition("Question")[0]
    assert TEXTS[0] in head
    assert second.startswith(head)
