# SPDX-License-Identifier: Apache-2.0
"""Generates the tables of docs/vllm-settings.md.

`python -m vllm_settings.page` from tests/ writes the page.
"""

import re
from collections.abc import Iterator
from pathlib import Path

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
    "Environment variables": VARIABLES,
}

_REQUEST_TITLES = {f"`{kind.__name__}`" for kind in REQUESTS}
_ATTRIBUTE = re.compile(r"^as (`\w+)\.\w+`$")
_INTRODUCTION = """\
# vLLM settings

Engine options, request fields and environment variables of vLLM 0.33 that are rejected or have no
effect here. **Every other one is honored**, as vLLM documents it.

- **Rejected**: an error names the setting, before the model loads or in response to the request.
- **No effect**: accepted, and ignored for the reason given.

Only some values are accepted for `--kv-cache-dtype` ([settings.md](settings.md)),
`--speculative-config` ([speculation.md](speculation.md)) and `--kv-transfer-config`
([disk](prefix-cache-on-disk.md), [peers](disaggregated-prefill.md)). `python -m vllm_settings.page`
in `tests/` writes this page from the tables of `tests/vllm_settings/`.
"""
_HEADINGS: dict[Kind, str] = {"refused": "Rejected", "without meaning": "No effect"}


def lines() -> Iterator[str]:
    """Yields lines of Markdown."""
    yield from _INTRODUCTION.splitlines()
    for title, table in (TABLES | {"Request bodies": _requests()}).items():
        if title in _REQUEST_TITLES:
            continue
        yield ""
        yield f"## {title}"
        for kind, heading in _HEADINGS.items():
            yield from _of_kind(kind, heading, table)


def _requests() -> Table:
    """Merges the tables of all request classes; names are qualified where classes differ."""
    merged: Table = {}
    for kind, table in REQUESTS.items():
        for name, row in table.items():
            others = [other[name].kind for other in REQUESTS.values() if name in other]
            same = len(set(others)) == 1
            merged.setdefault(name if same else f"{name}` of `{kind.__name__}", row)
    return merged


def _of_kind(kind: Kind, heading: str, table: Table) -> Iterator[str]:
    """Yields the table of one kind, grouped by reason."""
    names_by_reason: dict[str, list[str]] = {}
    for name, row in table.items():
        if row.kind == kind:
            reason = _ATTRIBUTE.sub(r"as in \1`", row.said)
            names_by_reason.setdefault(reason, []).append(f"`{name}`")
    if not names_by_reason:
        return
    yield ""
    yield f"| {heading} | Reason |"
    yield "| --- | --- |"
    for reason, names in names_by_reason.items():
        yield f"| {', '.join(names)} | {reason} |"


def page() -> str:
    """Returns the whole page."""
    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
