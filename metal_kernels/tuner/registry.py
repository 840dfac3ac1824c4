# SPDX-License-Identifier: Apache-2.0
"""Lists the tuner's choices in the order of the search."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from metal_kernels.tuner import (
    decode_rows,
    dispatches,
    force_fused,
    long_prompt,
    prompt_rows,
    shared,
    splits,
)
from metal_kernels.tuner.choice import Choice, ProcessChoice

CHOICES: tuple[Choice, ...] = (
    splits.CHOICE,
    decode_rows.CHOICE,
    shared.CHOICE,
    long_prompt.CHOICE,
    force_fused.CHOICE,
    prompt_rows.CHOICE,  # last, as it takes longest; the self-check has a first answer
)
#: By the name of their values in the record.
OF_PROCESSES: Mapping[str, ProcessChoice] = MappingProxyType({"dispatches": dispatches.CHOICE})
