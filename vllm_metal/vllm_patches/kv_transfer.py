# SPDX-License-Identifier: Apache-2.0
"""Sets the default of kv_load_failure_policy in `--kv-transfer-config`."""

from __future__ import annotations

from typing import Any

from pydantic.dataclasses import rebuild_dataclass

#: The vLLM releases that this is true for.
RELEASES = ("0.32",)
_SETTING = "kv_load_failure_policy"


def recompute_by_default() -> None:
    """Makes `kv_load_failure_policy` "recompute" where a user says nothing.

    vLLM's default, "fail", ends a request whose blocks cannot be loaded. A configuration does not
    tell a default from what its user wrote, so the default itself is changed: "fail" is honoured
    wherever it is written. Configurations that exist already keep theirs.
    """
    from vllm.config.kv_transfer import KVTransferConfig

    made: Any = KVTransferConfig  # for type checkers, no pydantic dataclass has these attributes
    if made.kv_load_failure_policy == "recompute":
        return
    made.kv_load_failure_policy = "recompute"
    made.__dataclass_fields__[_SETTING].default = "recompute"
    made.__pydantic_fields__[_SETTING].default = "recompute"
    rebuild_dataclass(made, force=True)  # its validator was built with the class
