# SPDX-License-Identifier: Apache-2.0
"""The chat's history, commands, figures, and its Ctrl-C."""

import os
import signal

import pytest

from vllm_metal.commands.chat.terminal import prints, session
from vllm_metal.commands.chat.terminal.conversation import ChatError, Conversation, TurnStats
from vllm_metal.commands.chat.terminal.session import interruptible, obey, questions


def words(messages: list[dict[str, str]]) -> int:
    """A tokenizer: words, and one token a message."""
    return sum(1 + len(message["content"].split()) for message in messages)


def test_messages_alternate_after_the_system_prompt() -> None:
    said = Conversation("be brief", [("a", "b")]).messages("c")
    assert [(m["role"], m["content"]) for m in said] == [
        ("system", "be brief"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
    ]


def test_without_a_system_prompt_the_template_has_the_say() -> None:
    assert Conversation().messages("q") == [{"role": "user", "content": "q"}]


@pytest.mark.parametrize("limit", range(10, 40))
def test_make_room_forgets_no_more_than_needed(limit: int) -> None:
    turns = [(f"question {n}", f"answer number {n}") for n in range(4)]
    conversation = Conversation("rules", list(turns))
    forgotten = conversation.make_room("now this", words, limit, reserve=5)
    assert conversation.turns == turns[forgotten:]
    needed = words(conversation.messages("now this")) + 5
    assert needed <= limit or not conversation.turns
    if forgotten:
        one_more = Conversation("rules", turns[forgotten - 1 :])
        assert words(one_more.messages("now this")) + 5 > limit


def test_room_for_the_answer_is_given_up_before_the_question() -> None:
    assert Conversation().make_room("one two three", words, limit=5, reserve=100) == 0


def test_a_question_that_fills_the_context_is_refused() -> None:
    conversation = Conversation("", [("a", "b")])
    with pytest.raises(ChatError, match=r"take 4 tokens.*context is 4.*--max-model-len"):
        conversation.make_room("one two three", words, limit=4, reserve=1)
    assert conversation.turns == [("a", "b")]


def test_speed_is_of_the_tokens_after_the_first() -> None:
    stats = TurnStats(37, 32, output_tokens=11, ttft=0.25, decode_time=0.5)
    assert stats.tokens_per_second == pytest.approx(20.0)
    assert stats.line() == "TTFT 250 ms · 20.0 tok/s · 37 prompt tokens, 32 cached"


def test_one_token_has_no_speed() -> None:
    assert TurnStats(3, 0, output_tokens=1, ttft=0.1, decode_time=0.0).cells()[-1] == "–"


def test_reset_keeps_the_system_prompt() -> None:
    conversation = Conversation("be brief", [("a", "b")])
    assert obey("/reset", conversation)
    assert conversation == Conversation("be brief")


def test_system_sets_the_prompt_and_starts_anew() -> None:
    conversation = Conversation("", [("a", "b")])
    assert obey("/system  speak like a pirate ", conversation)
    assert conversation == Conversation("speak like a pirate")


@pytest.mark.parametrize("line", ["/help", "/nonsense", "/resetnow"])
def test_other_commands_change_nothing(line: str) -> None:
    conversation = Conversation("s", [("a", "b")])
    assert obey(line, conversation)
    assert conversation == Conversation("s", [("a", "b")])


def test_quit_leaves() -> None:
    assert not obey("/quit", Conversation())


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        (["hi", EOFError], ["hi"]),
        (["", "  ", "hi ", EOFError], ["hi"]),
        ([KeyboardInterrupt, "hi", KeyboardInterrupt, "ho", EOFError], ["hi", "ho"]),
        (["hi", KeyboardInterrupt, KeyboardInterrupt], ["hi"]),
    ],
)
def test_the_prompt_ends_at_ctrl_d_or_two_ctrl_c_in_a_row(
    monkeypatch: pytest.MonkeyPatch, typed: list[str | type[BaseException]], asked: list[str]
) -> None:
    pending = iter(typed)

    def answer(prompt: str) -> str:
        line = next(pending)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", answer)
    assert list(questions()) == asked
    assert next(pending, None) is None


def test_ctrl_c_in_a_half_typed_line_only_drops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one", "two", "", "three", "", ""])  # what stands in the line at each Ctrl-C
    at_prompt = [""]

    def answer(prompt: str) -> str:
        at_prompt[0] = next(lines)
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(session, "half_typed", lambda: at_prompt[0])
    assert list(questions()) == []
    assert list(lines) == [""]  # it took two at an empty line, with a dropped one between


def test_the_first_ctrl_c_of_an_answer_only_asks_to_stop() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as interrupted:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_answer_moves_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither sets the clipboard (OSC 52), nor the title, nor clears the screen."""
    for piece in ("a\x1b]52;c;", "aGk=\x07b", "\x9b2J\x1b", "[2J\tc\n\x7f"):
        prints.stream(piece)
    prints.say("d\x1b[2J")
    assert capsys.readouterr().out == "a]52;c;aGk=b2J[2J\tc\nd[2J\n"
