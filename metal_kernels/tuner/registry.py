# SPDX-License-Identifier: Apache-2.0
"""Lists what the tuner chooses: a row each, in the order of the search."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from metal_kernels.tuner import (
    decode_rows,
    dispatches,
    force_fused,
    long_prompt,
    prompt_rows,
    splits,
)
from metal_kernels.tuner.choice import Choice, ProcessChoice

CHOICES: tuple[Choice, ...] = (
    splits.CHOICE,
    decode_rows.CHOICE,
    long_prompt.CHOICE,
    force_fused.CHOICE,
    prompt_rows.CHOICE,  # the longest; the self-check has an answer to begin with
)
#: By the name that their values have in the record.
OF_PROCESSES: Mapping[str, ProcessChoice] = MappingProxyType({"dispatches": dispatches.CHOICE})
