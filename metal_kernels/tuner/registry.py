# SPDX-License-Identifier: Apache-2.0
"""Lists what the tuner chooses: a row each, in the order of the search."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from metal_kernels.tuner import decode_rows, dispatches, long_prompt, shared, splits
from metal_kernels.tuner.choice import Choice, ProcessChoice

CHOICES: tuple[Choice, ...] = (
    splits.CHOICE,
    decode_rows.CHOICE,
    shared.CHOICE,
    long_prompt.CHOICE,
)
#: By the name that their values have in the record.
OF_PROCESSES: Mapping[str, ProcessChoice] = MappingProxyType({"dispatches": dispatches.CHOICE})
