# SPDX-License-Identifier: Apache-2.0
"""The chosen parsers read what each family writes, the same whole and streamed, wherever it is cut.

Where vLLM's own parser errs, the case is expected to fail and says how; it passes one day.
"""

import json
import re
from functools import cache

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tool_formats import turns
from tool_formats.families import RENDERED, WRITTEN, Rendered, Written
from tool_formats.templates import template
from tool_formats.turns import ANSWER, FILE, THOUGHT, WEATHER, Reader, Turn
from upstream.archive import UnavailableError

from vllm_metal.serving.parsers.choice import choose
from vllm_metal.serving.parsers.files import ModelFiles

#: Content and calls of each turn.
CASES = {
    "call": (None, (WEATHER,)),
    "calls": (None, (WEATHER, FILE)),
    "said": ("I look.", (FILE,)),
    "answer": (ANSWER, ()),
}
#: Tokens that end a turn, in all families.
ENDS = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "</s>", "<|assistant_end|>", "<seed:eos>")
ENDS += ("<｜end▁of▁sentence｜>", "[e~[", "<|user|>", "<|observation|>")
#: What looks like a token in a template: marks in angle brackets, and Mistral's in square ones.
TOKEN = re.compile(r"<[|｜]?/?[\w: ▁]+[|｜]?>|\[/?[A-Z_]{3,}\]")
#: Marks that are plain text to every tokenizer.
PLAIN = re.compile(
    r"</?(function|parameter|tools|response|tool|name|args|tool_response|invoke|role|IMPORTANT|"
    r"functions|schema|type|description|properties|required|parameters)\b[^>]*>"
)


def _files(family: str, text: str, tokens) -> ModelFiles:
    return ModelFiles(family, (text,), json.dumps(list(tokens), ensure_ascii=False))


@cache
def _rendered(family: Rendered, case: str) -> tuple[Reader, Turn]:
    try:
        text = template(family.template)
    except UnavailableError as error:
        pytest.skip(str(error))
    tokens = {found for found in TOKEN.findall(text) if not PLAIN.fullmatch(found)}
    if family.family == "llama":
        tokens.add("<|python_tag|>")  # its template does not write it for tools of the user's
    choice = choose(_files(family.family, text, sorted(tokens)))
    chosen = tuple(rule and rule.parser for rule in (choice.tool, choice.reasoning))
    assert chosen == family.parsers
    content, calls = CASES[case]
    thought = THOUGHT if family.thinks else None
    found = turns.turn(text, ENDS, thought=thought, content=content, calls=calls)
    assert found is not None, "the prompt begins otherwise than the turn"
    return Reader(choice, sorted(tokens)), found


@cache
def _written(family: Written, case: str) -> tuple[Reader, Turn]:
    choice = choose(_files(family.family, family.template, family.tokens))
    chosen = tuple(rule and rule.parser for rule in (choice.tool, choice.reasoning))
    assert chosen == family.parsers
    content, calls = CASES[case]
    thought = THOUGHT if family.thought else None
    text = family.thought(THOUGHT) if family.thought else ""
    text += (content or "") + (family.calls(calls) if calls else "")
    prompt = turns.render(family.template, [{"role": "user", "content": "?"}], prompt=True)
    return Reader(choice, family.tokens), Turn(text, turns.Read(thought, content, calls), prompt)


def _marked(families, name):
    """A parameter for each family and case; those in which vLLM errs are expected to fail."""
    for family in families:
        for case in family.cases:
            for way in ("whole", "streamed"):
                reason = family.errs.get(f"{case} {way}")
                if way == "streamed" and f"{case} whole" in family.errs:
                    continue  # there is nothing to be equal to
                marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
                named = f"{getattr(family, name)}-{case}-{way}"
                yield pytest.param(family, case, way, marks=marks, id=named)


def _check(reader: Reader, turn: Turn, way: str, examples: int) -> None:
    if way == "whole":
        assert reader.whole(turn) == turn.meant
        return
    most = len(reader.units(turn.text))

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cuts=st.sets(st.integers(1, most)))
    @example(cuts=set())
    @example(cuts=set(range(most)))
    def streamed_is_whole(cuts):
        assert reader.streamed(turn, cuts) == turn.meant

    streamed_is_whole()


@pytest.mark.parametrize(("family", "case", "way"), [*_marked(WRITTEN, "name")])
def test_formats_that_are_written_down(family, case, way):
    _check(*_written(family, case), way, examples=8)


@pytest.mark.more
@pytest.mark.parametrize(("family", "case", "way"), [*_marked(RENDERED, "template")])
def test_what_a_familys_own_template_writes(family, case, way):
    _check(*_rendered(family, case), way, examples=10)
