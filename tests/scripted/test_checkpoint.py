# SPDX-License-Identifier: Apache-2.0
"""A script checkpoint generates its script in transformers."""

import pytest

import scripted
from scripted import Call, Script, Turn
from scripted.dense import Said, asked

TITLE = "Write a title for this"
READ = Call("read", {"path": "notes.txt", "lines": [1, 2], "text": 'né "so"\n'})
SCRIPT = Script(
    (
        Turn("I look at it.", (READ,)),
        Turn(calls=(READ, Call("run", {"command": "ls"}))),
        Turn("the the the the", (Call("edit", '{"path": "notes'),)),
        *(Turn(f"Step {count}.", (READ,)) for count in range(59)),
        Turn("Done: \N{SNOWMAN}."),
    )
)
SIDE = Script((Turn("A title"),), marker=TITLE)
LATER = Script((Turn("Another", (READ,)), Turn("A summary")), marker="Summarize")


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return Said(scripted.checkpoint(tmp_path_factory.mktemp("plain"), [SCRIPT, SIDE, LATER]))


@pytest.mark.parametrize(
    ("results", "turn"), [(0, 0), (1, 1), (3, 2), (4, 3), (40, 39), (62, 61), (63, 62), (64, 62)]
)
def test_the_number_of_tool_results_chooses_the_turn(said, results, turn):
    assert said(asked("Do it.", results)) == SCRIPT.turns[turn].answer


def test_a_long_context_changes_nothing(said):
    assert said(asked("Do it.", 62, "word and word " * 60)) == SCRIPT.turns[61].answer


@pytest.mark.parametrize(
    ("text", "results", "answer"),
    [
        (f"Please. {TITLE}: hello", 0, "A title"),
        ("Summarize it", 0, LATER.turns[0].answer),
        ("Summarize it", 1, "A summary"),
        (f"Summarize it. {TITLE}", 1, "A title"),
    ],
)
def test_a_marker_chooses_a_script_of_its_own(said, text, results, answer):
    assert said(asked(text, results)) == answer


def test_reasoning_comes_first_and_ends_in_the_token_that_parsers_look_for(tmp_path):
    script = Script((Turn("Now.", (READ,), reasoning="Let me think."), Turn("Done.")))
    said = Said(scripted.checkpoint(tmp_path, [script]))
    assert said(asked("Do it.")) == f"Let me think.\n</think>\n\n{script.turns[0].answer}"
    assert said(asked("Do it.", 1)) == "\n</think>\n\nDone."
    assert len(said.tokenizer.encode("</think>")) == 1


@pytest.mark.parametrize(
    ("scripts", "message"),
    [
        ([SIDE], "one has to be without a marker"),
        ([SCRIPT, SCRIPT], "one has to be without a marker"),
        ([SCRIPT] + [SIDE] * 24, "there is room for 24"),
        ([Script(())], "it needs turns"),
        ([Script((Turn(reasoning="Hm."),))], "it needs turns"),
        ([Script((Turn("One."), Turn("Two.")))], "without tool results is not its last"),
        ([Script((*(Turn(calls=(READ,)),) * 65, Turn("End.")))], "64 can be counted"),
    ],
)
def test_scripts_that_cannot_be_said_are_refused(scripts, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        scripted.checkpoint(tmp_path, scripts)
