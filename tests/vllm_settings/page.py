# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/vllm-settings.md.

`python -m vllm_settings.page` from tests/ writes the page.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from vllm_settings.engine_args import TABLE as ENGINE_ARGS
from vllm_settings.requests import TABLES as REQUESTS
from vllm_settings.row import Kind, Table
from vllm_settings.sampling import POOLING_PARAMS, SAMPLING_PARAMS
from vllm_settings.variables import TABLE as VARIABLES

PAGE = Path(__file__).parents[2] / "docs" / "vllm-settings.md"
TABLES: dict[str, Table] = {
    "`EngineArgs` and `AsyncEngineArgs`": ENGINE_ARGS,
    "`SamplingParams`": SAMPLING_PARAMS,
    "`PoolingParams`": POOLING_PARAMS,
    **{f"`{kind.__name__}`": table for kind, table in REQUESTS.items()},
    "Variables of the environment": VARIABLES,
}

_INTRODUCTION = """\
# What becomes of vLLM's settings

Every option of vLLM's engine, every field of a request, and every variable of its environment is
one of three:

- **honored**: a test shows that a result changes with it, or that a limit holds; its name stands
  beside it. Or code of vLLM's that runs here unchanged reads it (its server, scheduler,
  tokenizers, grammars and logs), and a test shows that an option's value arrives there;
- **without meaning** here: nothing that it could change exists, for the reason given;
- **refused**: with one error that names it, before a model loads, or as an answer to the request.

Values with a meaning of their own (`--kv-cache-dtype`, `--speculative-config`,
`--kv-transfer-config`) are honored or refused one by one; [settings.md](settings.md),
[speculation.md](speculation.md), [prefix-cache-on-disk.md](prefix-cache-on-disk.md) and
[disaggregated-prefill.md](disaggregated-prefill.md) list them.

This page is written from the tables in `tests/vllm_settings/`: `python -m vllm_settings.page`
from `tests/`. A field of a new vLLM release that the tables lack fails a test there, and so does
a row whose test is gone.
"""


def lines() -> Iterator[str]:
    """Lines of Markdown."""
    yield from _INTRODUCTION.splitlines()
    yield ""
    yield "| | honored | without meaning | refused |"
    yield "| --- | ---: | ---: | ---: |"
    for title, table in TABLES.items():
        counts = Counter(row.kind for row in table.values())
        yield f"| {title} | " + " | ".join(str(counts[kind]) for kind in get_args(Kind)) + " |"
    for title, table in TABLES.items():
        yield ""
        yield f"## {title}"
        for kind in get_args(Kind):
            yield from _of_kind(kind, table)


def _of_kind(kind: Kind, table: Table) -> Iterator[str]:
    """The settings of one kind, those that share what is said of them in one line."""
    said: dict[str, list[str]] = {}
    for name, row in table.items():
        if row.kind == kind:
            said.setdefault(row.said, []).append(f"`{name}`")
    if not said:
        return
    yield ""
    yield f"| {kind} | {'shown by, or read by' if kind == 'honored' else 'because'} |"
    yield "| --- | --- |"
    for reason, names in said.items():
        yield f"| {', '.join(names)} | {reason} |"


def page() -> str:
    """The whole page."""
    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
