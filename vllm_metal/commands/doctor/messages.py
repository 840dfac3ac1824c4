# SPDX-License-Identifier: Apache-2.0
"""What the doctor's child processes tell it, among all else that they print."""

from __future__ import annotations

import json
from typing import Any

_MARK = "vllm-metal-doctor: "


def say(**fields: Any) -> None:
    """Tells the doctor; the fields must be JSON. `stage` names what is about to be done."""
    # Begins with a line of its own: what others printed may lack its end.
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
