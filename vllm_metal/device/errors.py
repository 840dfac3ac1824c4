# SPDX-License-Identifier: Apache-2.0
"""Asks MLX for errors of the device that nobody was told of.

On a GPU, MLX notes that a command buffer failed, and tells whoever asks next, once: who begins a
command buffer, or waits for one that has not ended (Error::check, in mlx/backend/metal). To read an
array asks for errors of the command buffer that ended its evaluation, and only once the handler of
that one has run (Event::check_error): what happens to be in memory can be read before. So a value
can be trusted after `check` or `wait`, or once the device was given other work after it had been
read, and not before.

No cheaper check is known: each evaluation that MLX begins on a GPU ends a command buffer.
"""

import mlx.core as mx


def check() -> None:
    """Raises what failed on the device so far; waits for nothing.

    A command buffer that is begun asks. Metal runs the handlers that note errors in the order of
    the command buffers, on a thread of its own, and an array can be read once its last one has
    ended: this asks too early only where an earlier one failed, its last one did not, and that
    thread is late by all the time between them.

    Raises:
        RuntimeError: the oldest error that MLX has not told of.
    """
    mx.async_eval(mx.array(0) + 1)


def wait() -> None:
    """Waits for all that the device was given, and raises what failed.

    Metal's waitUntilCompleted returns when all handlers have run, so no error can come later.

    Raises:
        RuntimeError: the oldest error that MLX has not told of.
    """
    mx.synchronize()
