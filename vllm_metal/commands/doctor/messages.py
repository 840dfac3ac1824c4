# SPDX-License-Identifier: Apache-2.0
"""Messages that the doctor's child processes send it, on lines among all that they print."""

from __future__ import annotations

import json
from typing import Any

_MARK = "vllm-metal-doctor: "


def say(**fields: Any) -> None:
    """Sends the doctor a message; the fields must be JSON. `stage` names what begins now."""
    # Begins a new line: what was printed before may not end with one.
    print(f"\n{_MARK}{json.dumps(fields)}", flush=True)


def heard(line: str) -> dict[str, Any] | None:
    """The fields of a line that `say` printed; None for any other."""
    _, mark, text = line.partition(_MARK)
    if not mark:
        return None
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None
