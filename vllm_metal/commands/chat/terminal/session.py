# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal chat --terminal`: reads lines, obeys commands, and lets Ctrl-C stop an answer."""

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import FrameType

try:
    import readline  # also gives input() its editing and history
except ImportError:
    readline = None  # type: ignore[assignment]

from vllm_metal.commands import early_checks
from vllm_metal.commands.chat import surroundings
from vllm_metal.commands.chat.terminal import prints
from vllm_metal.commands.chat.terminal.conversation import (
    AnswerLimits,
    ChatEngine,
    ChatError,
    Conversation,
    ask,
)

HELP = """\
/reset        forget the conversation
/system TEXT  set the system prompt (empty: the model's own) and forget the conversation
/help         show this
/quit         leave; so does Ctrl-D, or Ctrl-C twice
Ctrl-C during an answer stops it; the text so far is kept."""


def run(args: argparse.Namespace) -> int:
    """Chats until the user leaves, and returns the exit status.

    Args:
        args: of `vllm_metal.commands.cli`.
    """
    device = surroundings.prepare(offline=args.model is None)
    if args.model is not None:
        early_checks.check_model(args.model, computes=True)
        early_checks.check_template(args.model)
    try:
        with prints.working("Loading the model (the embedded one is converted the first time)"):
            model = args.model or str(surroundings.default_model())
            engine = ChatEngine(model, args.max_model_len, args.kv_cache_gib)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    except KeyboardInterrupt:
        return 130
    where = {"metal": "Metal", "cpu": "MLX's CPU backend", None: "vLLM's own backend"}[device]
    shown = args.model or Path(model).name
    prints.say(f"{shown} on {where}, {engine.max_model_len} tokens of context", "dim")
    prints.say("/help for the commands", "dim")
    conversation = Conversation(args.system)
    limits = AnswerLimits(args.max_tokens, args.temperature)
    try:
        for line in questions():
            if line.startswith("/"):
                if not obey(line, conversation):
                    break
            else:
                take_turn(engine, conversation, line, limits)
    finally:
        engine.close()
    return 0


def questions() -> Iterator[str]:
    """The user's lines that are not empty, until Ctrl-D or a second Ctrl-C in a row."""
    interrupted = False
    while True:
        try:
            line = input("\nyou> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if half_typed():  # Ctrl-C only discards the line
                continue
            if interrupted:
                return
            interrupted = True
            prints.say("Press Ctrl-C again, Ctrl-D or type /quit to leave", "dim")
            continue
        interrupted = False
        if line:
            yield line


def half_typed() -> str:
    """What was typed before Ctrl-C."""
    return readline.get_line_buffer() if readline else ""


def obey(line: str, conversation: Conversation) -> bool:
    """Carries out the command in `line`; False if the chat is to end."""
    command, _, rest = line.partition(" ")
    if command == "/quit":
        return False
    if command == "/help":
        prints.say(HELP)
    elif command == "/reset":
        conversation.turns.clear()
        prints.say("The conversation is forgotten.", "dim")
    elif command == "/system":
        conversation.system = rest.strip()
        conversation.turns.clear()
        what = "set" if conversation.system else "the model's own again"
        prints.say(f"The system prompt is {what}; the conversation is forgotten.", "dim")
    else:
        prints.say(f"{command} is not a command; /help lists them", "red")
    return True


def take_turn(
    engine: ChatEngine, conversation: Conversation, question: str, limits: AnswerLimits
) -> None:
    """Asks `question` and prints the answer and its figures."""
    limit = engine.max_model_len
    # An answer may reserve half of the context at most; the rest is for the conversation.
    reserve = min(limits.max_tokens, limit // 2)
    try:
        forgotten = conversation.make_room(
            question, lambda said: len(engine.encode(said)), limit, reserve
        )
        if forgotten:
            turns = "turn is" if forgotten == 1 else f"{forgotten} turns are"
            prints.say(
                f"The conversation no longer fits the context of {limit} tokens: "
                f"its oldest {turns} forgotten.",
                "yellow",
            )
        with interruptible() as interrupted:
            answer = ask(engine, conversation, question, limits, prints.stream, interrupted.is_set)
    except ChatError as error:
        prints.say(str(error), "red")
        return
    print()
    notes = {
        "length": " · ended by --max-tokens or the context's end",
        "interrupted": " · stopped",
    }
    figures = answer.stats.line() if answer.stats else "no answer yet"
    prints.say(figures + notes.get(answer.finish, ""), "dim")


@contextmanager
def interruptible() -> Iterator[Event]:
    """Within the block, Ctrl-C sets the event and does not break a step; a second one raises."""
    interrupted = Event()

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
