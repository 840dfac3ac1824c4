# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/vllm-settings.md.

`python -m vllm_settings.page` from tests/ writes the page.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
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

_ATTRIBUTE = re.compile(r"^as (`\w+)\.\w+`$")
_INTRODUCTION = """\
# vLLM's settings: which are supported

Every engine option, request field and environment variable of vLLM is one of three:

- **honored**: a test shows that it changes a result or that a limit holds (`tests/vllm_settings/`
  names it), or vLLM's own code reads it unchanged (server, scheduler, tokenizers, grammars, logs);
- **without meaning**: it has no effect here, for the reason given;
- **refused**: an error names it, before a model loads or as the response to the request.

`--kv-cache-dtype`, `--speculative-config` and `--kv-transfer-config` accept some values only: see
[settings.md](settings.md), [speculation.md](speculation.md),
[prefix-cache-on-disk.md](prefix-cache-on-disk.md) and
[disaggregated-prefill.md](disaggregated-prefill.md). `python -m vllm_settings.page` in `tests/`
writes this page from the tables in `tests/vllm_settings/`.
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
    """The settings of one kind; without those that are honored, by their reason."""
    said: dict[str, list[str]] = {}
    for name, row in table.items():
        if row.kind == kind:
            reason = _ATTRIBUTE.sub(r"as in \1`", row.said)
            said.setdefault("" if kind == "honored" else reason, []).append(f"`{name}`")
    if not said:
        return
    yield ""
    if kind == "honored":
        yield from wrap(f"Honored: {', '.join(said[''])}.", 118, break_on_hyphens=False)
        return
    yield f"| {kind} | because |"
    yield "| --- | --- |"
    for reason, names in said.items():
        yield f"| {', '.join(names)} | {reason} |"


def page() -> str:
    """The whole page."""
    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
