# SPDX-License-Identifier: Apache-2.0
"""Runs before and after the engine in a server: tenants, response cache, time limits.

vLLM imports the class `Tenants` by name: `--middleware vllm_metal.serving.Tenants`.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # vLLM creates the object at the first connection, where an error would be swallowed. It imports
    # the class at startup, so the settings are read here.
    if name != "Tenants":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_metal.serving import config, gate

    config.required()
    return gate.Tenants
