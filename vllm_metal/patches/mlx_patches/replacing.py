# SPDX-License-Identifier: Apache-2.0
"""Replaces functions of MLX and mlx-lm, permanently or within a block."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Sets an attribute until the end of the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def wrap(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Replaces a function of a module or class by `make(before)`; each call wraps it again."""
    before = getattr(owner, name)
    setattr(owner, name, functools.wraps(before)(make(before)))


def after_init(cls: Any, then: Callable[..., None]) -> None:
    """Runs `then` with the same arguments after the `__init__` of a class."""

    def following(before: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, *args: Any, **options: Any) -> None:
            before(self, *args, **options)
            then(self, *args, **options)

        return init

    wrap(cls, "__init__", following)


#: Prefixes of the libraries' modules of models.
MLX_LM, MLX_VLM = "mlx_lm.models.", "mlx_vlm.models."


def spread(name: str, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Replaces `before` by `after` in all modules of models imported so far; idempotent.

    name: the modules' name of the function.
    """
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith((MLX_LM, MLX_VLM)) and getattr(module, name, None) is before:
            setattr(module, name, after)


def check_release(package: str, supported: Sequence[str], subject: str) -> None:
    """Raises ValueError if a package's release is not one that its patches were written for.

    Args:
        package: name of the distribution.
        supported: releases such as "mlx-lm 0.32".
        subject: the part that may differ from transformers', for the message.
    """
    release = f"{package} " + ".".join(version(package).split(".")[:2])
    if release not in supported:
        raise ValueError(
            f"{release} is not supported: {subject} may differ from transformers'. Install "
            f"{' or '.join(supported)}"
        )
