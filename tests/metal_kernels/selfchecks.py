# SPDX-License-Identifier: Apache-2.0
"""Runs all checks of a case in the test's process."""

from metal_kernels.selfcheck import Case, Outcome, check_kernel, checks, next_check, usable


def check(case: Case, num_steps: int) -> list[Outcome]:
    """Checks the case's kernels with the current compiler, on MLX's default device."""
    outcomes: list[Outcome] = []
    while (following := next_check(case, outcomes)) is not None:
        outcomes.append(check_kernel(case, following, num_steps, usable(case, outcomes)))
    return outcomes


def in_use(case: Case) -> list[str]:
    """Returns the kernels of `case.kernels` that layers of its shape ever need."""
    return list(dict.fromkeys(check.kernel for check in checks(case)))
