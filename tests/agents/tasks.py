# SPDX-License-Identifier: Apache-2.0
"""The clients' tasks, as scripts that call each client's own tools with its own arguments."""

from collections.abc import Callable
from dataclasses import dataclass

from scripted import Call, Script, Turn

#: Initial files of the folder, and the final content of `notes.txt`.
FILES = {"notes.txt": "alpha\ngamma\n", "other.txt": "delta\n"}
EDITED = "beta\ngamma\n"
#: Output of the task's command for `EDITED`.
PRINTED = "notes.txt has 2 lines"
STEPS = 19
#: Minimum cached share of a prompt from the second turn on.
ENOUGH = 0.9
DONE, ALL_STEPS = "The file says beta now.", "All steps are done."
#: opencode's request for a title of the conversation.
TITLE_MARKER, TITLE = "You are a title generator.", "A word is changed"

#: Client libraries, in our own loops with pi's tools.
SDKS = ("openai", "anthropic")

_PATCH = """apply_patch <<'EOF'
*** Begin Patch
*** Update File: {path}
@@
-{old}
+{new}
*** End Patch
EOF
"""
_BLOCK = "notes.txt\n```\n<<<<<<< SEARCH\nalpha\n=======\nbeta\n>>>>>>> REPLACE\n```"


@dataclass(frozen=True)
class Tools:
    """Makes calls of one client's tools: read a file, replace a word in it, run a command.

    Attributes:
        read: takes a path.
        edit: takes a path, the old word and the new one.
        run: takes a command line.
    """

    read: Callable[[str], Call]
    edit: Callable[[str, str, str], Call]
    run: Callable[[str], Call]


def tools(folder: str) -> dict[str, Tools]:
    """Returns the tools of each client that works in `folder`, an absolute path."""
    return {
        "claude": Tools(
            lambda path: Call("Read", {"file_path": f"{folder}/{path}"}),
            lambda path, old, new: Call(
                "Edit", {"file_path": f"{folder}/{path}", "old_string": old, "new_string": new}
            ),
            lambda command: Call("Bash", {"command": command}),
        ),
        "codex": Tools(
            lambda path: Call("exec_command", {"cmd": f"cat {path}"}),
            lambda path, old, new: Call(
                "exec_command", {"cmd": _PATCH.format(path=path, old=old, new=new)}
            ),
            lambda command: Call("exec_command", {"cmd": command}),
        ),
        "opencode": Tools(
            lambda path: Call("read", {"filePath": f"{folder}/{path}"}),
            lambda path, old, new: Call(
                "edit", {"filePath": f"{folder}/{path}", "oldString": old, "newString": new}
            ),
            lambda command: Call("bash", {"command": command}),
        ),
        "pi": Tools(
            lambda path: Call("read", {"path": path}),
            lambda path, old, new: Call(
                "edit", {"path": path, "edits": [{"oldText": old, "newText": new}]}
            ),
            lambda command: Call("bash", {"command": command}),
        ),
    }


def marker(client: str, task: str) -> str:
    """Returns the prompt text that selects a client's script: `edit`, `steps` or `broken`."""
    return f"[{client} {task}]"


def scripts(folder: str) -> list[Script]:
    """Returns all scripts, for clients that work in `folder`."""
    made = [Script((Turn(TITLE),), TITLE_MARKER)]
    for client, its in tools(folder).items():
        made += [
            Script(edit_turns(its), marker(client, "edit")),
            Script(steps_turns(its), marker(client, "steps")),
            Script(broken_turns(its), marker(client, "broken")),
        ]
    for sdk in SDKS:
        made += [
            Script(edit_turns(tools(folder)["pi"]), marker(sdk, "edit")),
            Script(steps_turns(tools(folder)["pi"]), marker(sdk, "steps")),
        ]
    made.append(Script((Turn(f"I change it.\n\n{_BLOCK}"),), marker("aider", "edit")))
    return [*made, Script((Turn("No script is asked for."),))]


def edit_turns(its: Tools) -> tuple[Turn, ...]:
    """Reads two files at once, edits one, runs a command that needs the edit, and ends."""
    run = 'cp notes.txt seen.txt; echo "notes.txt has $(wc -l < notes.txt) lines"'
    return (
        Turn("I read both files.", (its.read("notes.txt"), its.read("other.txt"))),
        Turn(calls=(its.edit("notes.txt", "alpha", "beta"),)),
        Turn("Now I look at it.", (its.run(run),)),
        Turn(DONE),
    )


def steps_turns(its: Tools) -> tuple[Turn, ...]:
    """Runs one command per turn, then ends: 20 turns."""
    steps = (
        Turn(f"Step {step}.", (its.run(f"echo step {step} >> steps.txt"),))
        for step in range(1, STEPS + 1)
    )
    return (*steps, Turn(ALL_STEPS))


def broken_turns(its: Tools) -> tuple[Turn, ...]:
    """Makes a call with invalid JSON arguments, then a valid one, and ends."""
    call = its.run("echo right > right.txt")
    broken = Call(call.name, '{"command": "echo')
    return Turn(calls=(broken,)), Turn("Again.", (call,)), Turn(DONE)
