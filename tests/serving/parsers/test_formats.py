# SPDX-License-Identifier: Apache-2.0
"""Chosen parsers read each family's format, whole and streamed with any cuts.

Where vLLM's own parser errs, the case is expected to fail and says how; it passes one day.
"""

import json
import re
from functools import cache

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tool_formats import harmony, turns
from tool_formats.families import RENDERED, Rendered
from tool_formats.templates import template
from tool_formats.turns import ANSWER, FILE, THOUGHT, WEATHER, Reader, Turn
from tool_formats.written import WRITTEN, Written
from upstream.archive import UnavailableError

from vllm_metal.serving.parsers.choice import Choice, choose
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
ENDS += ("<｜end▁of▁sentence｜>", "[e~[", "<|user|>", "<|observation|>", "<|role_end|>", "<|eos|>")
ENDS += (
    "<|message_sep|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "</assistant>",
    "<|eot|>",
)
ENDS += ("<|close|>message", "<|END_OF_TURN_TOKEN|>", "<|call|>", "<|return|>")
#: Looks like a token in a template: marks in angle brackets, and Mistral's in square ones.
TOKEN = re.compile(r"<[|｜]?/?[\w: ▁]+[|｜]?>|\[/?[A-Z_]{3,}\]")
#: Marks that are plain text to every tokenizer.
PLAIN = re.compile(
    r"</?(function|parameter|tools|response|tool|name|args|tool_response|invoke|role|IMPORTANT|"
    r"functions|schema|type|description|properties|required|parameters)\b[^>]*>"
)


def _files(family: str, text: str, tokens) -> ModelFiles:
    return ModelFiles(family, (text,), json.dumps(list(tokens), ensure_ascii=False))


def _chosen(family: Rendered | Written, template: str, tokens) -> Choice:
    """Asserts that the expected parser is chosen, with its known defect; returns the choice."""
    choice = choose(_files(family.family, template, tokens))
    chosen = tuple(rule and rule.parser for rule in (choice.tool, choice.reasoning))
    assert chosen == family.parsers
    assert any("Known problem" in line for line in choice.lines()) == bool(family.errs)
    return choice


@cache
def _rendered(family: Rendered, case: str) -> tuple[Reader, Turn]:
    try:
        text = template(family.template)
    except UnavailableError as error:
        pytest.skip(str(error))
    if family.module:
        pytest.importorskip(family.module, reason=f"its parser needs {family.module}")
    tokens = {found for found in TOKEN.findall(text) if not PLAIN.fullmatch(found)}
    tokens |= set(family.tokens)
    choice = _chosen(family, text, sorted(tokens))
    content, calls = CASES[case]
    thought = THOUGHT if family.thinks else None
    found = turns.turn(text, ENDS, thought=thought, content=content, calls=calls)
    assert found is not None, "the prompt begins otherwise than the turn"
    return Reader(choice, sorted(tokens)), found


@cache
def _written(family: Written, case: str) -> tuple[Reader, Turn]:
    choice = _chosen(family, family.template, family.tokens)
    content, calls = CASES[case]
    thought = THOUGHT if family.thought else None
    text = family.thought(THOUGHT) if family.thought else ""
    text += (content or "") + (family.calls(calls) if calls else "")
    prompt = turns.render(family.template, [{"role": "user", "content": "?"}], prompt=True)
    return Reader(choice, family.tokens), Turn(text, turns.Read(thought, content, calls), prompt)


def _marked(families, name):
    """Returns a parameter per family and case; known errors of vLLM are expected failures."""
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
    _check(*_written(family, case), way, examples=2)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """A reader of gpt-oss's output, and its template."""
    folder = tmp_path_factory.mktemp("vocabulary")
    with pytest.MonkeyPatch.context() as patch:
        try:
            text = template("openai-gpt-oss-120b")
            harmony.vocabulary(folder)
        except UnavailableError as error:
            pytest.skip(str(error))
        patch.setenv(harmony.VARIABLE, str(folder))
        choice = choose(_files("gpt_oss", text, ()))
        assert choice.flags[-1] == "openai_gptoss" and choice.tool.parser == "openai"
        yield harmony.HarmonyReader(choice), text


@pytest.mark.more
@pytest.mark.parametrize("way", ["whole", "streamed"])
@pytest.mark.parametrize("case", ["call", "answer"])  # one call a turn, and no text beside it
def test_what_gpt_oss_writes(gpt_oss, case, way):
    reader, text = gpt_oss
    content, calls = CASES[case]
    turn = turns.turn(text, ENDS, thought=THOUGHT, content=content, calls=calls)
    _check(reader, turn, way, examples=5)


@pytest.mark.more
@pytest.mark.parametrize(("family", "case", "way"), [*_marked(RENDERED, "template")])
def test_what_a_familys_own_template_writes(family, case, way):
    _check(*_rendered(family, case), way, examples=5)
