# SPDX-License-Identifier: Apache-2.0
"""Prints and plots the results of peers.py."""

from __future__ import annotations

import statistics
from pathlib import Path

from _peers_turns import ONE, SHARED, UNRELATED, Figures, median
from _shared import digits, table

OURS_ON, OURS_OFF, MLX_LM_SERVER = "vllm-metal", "vllm-metal, no prefix cache", "mlx-lm server"
CHAT_GOAL = 1.3  # the slowest later turn relative to turn 2
_TITLES = {SHARED: "shared prefix", UNRELATED: "unrelated", ONE: "one stream"}


def report(found: dict) -> None:
    """Prints the results.

    Args:
        found: the results as in JSON; unmeasured parts are absent.
    """
    parts = [part for part in _TITLES if part in found]
    if parts:
        _report_engines({part: found[part] for part in parts})
    if "chat" in found:
        _report_chat(found["chat"]["chats"])


def _report_engines(found: dict) -> None:
    rows = [
        [f"{_TITLES[part]}, {peer}, {state}", *map(digits, vars(_median(runs)).values())]
        for part, of_part in found.items()
        for peer, states in of_part["runs"].items()
        for state, runs in states.items()
    ]
    table(["", "output tok/s", "TTFT, ms", "TPOT, ms"], rows)
    rows = [
        [
            f"{_TITLES[part]}: {row['ours']} / {row['peer']} {row['theirs']}",
            *(f"{row[name]:.2f}" for name in Figures.__annotations__),
            f"≥ {row['goal']}" if row["goal"] else "–",
        ]
        for part, of_part in found.items()
        for row in of_part["ratios"]
    ]
    table(["vllm-metal / peer", "tok/s", "TTFT", "TPOT", "goal, tok/s"], rows)


def _median(runs: list[dict]) -> Figures:
    return median([Figures(**run) for run in runs])


def chat_medians(chats: list[list[dict]], name: str) -> list[float]:
    """Returns a metric per turn, the median over chats."""
    return [statistics.median(turn[name] for turn in turns) for turns in zip(*chats, strict=True)]


def growth(ttft: list[float]) -> float:
    """Returns the longest time to first token from turn 3 on, relative to turn 2."""
    return max(ttft[2:]) / ttft[1]


def _report_chat(chats: dict[str, list[list[dict]]]) -> None:
    ttft = {server: chat_medians(of_server, "ttft_ms") for server, of_server in chats.items()}
    tokens = {
        server: [
            f"{digits(cached)} of {digits(prompt)}"
            for cached, prompt in zip(
                chat_medians(of_server, "cached_tokens"),
                chat_medians(of_server, "prompt_tokens"),
                strict=True,
            )
        ]
        for server, of_server in chats.items()
    }
    rows = [
        [str(number + 1)]
        + [f"{digits(ttft[server][number])} ({tokens[server][number]})" for server in chats]
        for number in range(len(ttft[OURS_ON]))
    ]
    table(["turn: TTFT, ms (tokens found)", *chats], rows)
    for server, times in ttft.items():
        goal = f" (goal ≤ {CHAT_GOAL})" if server == OURS_ON else ""
        print(
            f"{server}: the longest TTFT of turns 3 and on is {growth(times):.2f} × turn 2's{goal}"
        )
    print()


def plot(found: dict, target: Path) -> None:
    """Plots throughput by part and peer, and time to first token by turn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = [part for part in (*_TITLES, "chat") if part in found]
    canvas, panels = pyplot.subplots(
        1, len(parts), figsize=(3.4 * len(parts), 3.4), layout="constrained", squeeze=False
    )
    for panel, part in zip(panels[0], parts, strict=True):
        panel.spines[["top", "right"]].set_visible(False)
        if part == "chat":
            for server, chats in found[part]["chats"].items():
                times = chat_medians(chats, "ttft_ms")
                panel.plot(range(1, len(times) + 1), times, "o-", label=server, markersize=3)
            panel.set_title("a growing chat: TTFT, ms, by turn", fontsize=9)
            panel.set_ylim(bottom=0)
            panel.legend(frameon=False, fontsize=7)
            continue
        bars = {
            f"{peer}\n{state}": _median(runs).tokens_per_s
            for peer, states in found[part]["runs"].items()
            for state, runs in states.items()
        }
        colors = ["C0" if name.startswith(OURS_ON) else "0.7" for name in bars]
        drawn = panel.bar(range(len(bars)), list(bars.values()), color=colors)
        panel.bar_label(drawn, [digits(height) for height in bars.values()], fontsize=7)
        panel.set_xticks(range(len(bars)), list(bars), fontsize=7, rotation=60)
        panel.set_title(f"{_TITLES[part]}: output tok/s", fontsize=9)
    canvas.savefig(target, dpi=150)
    pyplot.close(canvas)
