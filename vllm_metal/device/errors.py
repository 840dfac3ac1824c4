# SPDX-License-Identifier: Apache-2.0
"""Asks MLX for device errors that it has not reported yet."""

import mlx.core as mx

# On a GPU, MLX notes that a command buffer failed, and reports it once, to the next caller that
# begins a command buffer or waits for one that has not ended (Error::check, in mlx/backend/metal).
# Reading an array reports errors of the command buffer that ended its evaluation, but only after
# the handler of that one has run (Event::check_error): whatever is in memory can be read before. So
# a value can be trusted only after `check` or `wait`, or once the device got other work after the
# value was read.


def check() -> None:
    """Raises the oldest unreported device error, a RuntimeError; does not wait for the device."""
    # Beginning a command buffer reports errors; no cheaper way is known, as each evaluation on a
    # GPU ends one. Metal runs the handlers that note errors on a thread of its own, in the order of
    # the command buffers, and an array can be read once its last one has ended. So this is too
    # early only if an earlier one failed, the last one did not, and that thread lags by all the
    # time between the two.
    mx.async_eval(mx.array(0) + 1)


def wait() -> None:
    """Waits for all submitted work; raises the oldest unreported device error, a RuntimeError."""
    # Metal's waitUntilCompleted returns after all handlers have run, so no error can come later.
    mx.synchronize()
