# SPDX-License-Identifier: Apache-2.0
"""Manifests: what the fingerprints of a cache stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_metal.kv_transfer.disk import layout


def manifest_content(fingerprint: str, facts: Mapping[str, Any]) -> bytes:
    """The file of a fingerprint; what JSON does not know becomes text."""
    manifest = {"fingerprint": fingerprint, "facts": dict(facts)}
    return json.dumps(manifest, indent=1, sort_keys=True, default=str).encode() + b"\n"


def read_manifests(root: Path) -> dict[str, Mapping[str, Any]]:
    """Facts by fingerprint; those whose manifest cannot be read are left out."""
    found: dict[str, Mapping[str, Any]] = {}
    with suppress(OSError):
        for fingerprint in layout.fingerprints(root):
            with suppress(OSError, ValueError):
                manifest = json.loads((root / fingerprint / layout.MANIFEST).read_bytes())
                facts = manifest.get("facts") if isinstance(manifest, dict) else None
                if isinstance(facts, dict):
                    found[fingerprint] = facts
    return found
