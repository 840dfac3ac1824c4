# SPDX-License-Identifier: Apache-2.0
"""What a server does before and after the engine: tenants, answers from a cache, time limits.

vLLM takes the class `Tenants` by its name: `--middleware vllm_metal.serving.Tenants`.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # vLLM makes the object when the first connection comes, where an error would be swallowed. It
    # asks for the class while it starts, so the settings are read then.
    if name != "Tenants":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_metal.serving import config, gate

    config.required()
    return gate.Tenants
