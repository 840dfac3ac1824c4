# SPDX-License-Identifier: Apache-2.0
"""Headers of a checkpoint's tensors, and checks shared by readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_metal.engine.weights.files import Header
from vllm_metal.engine.weights.quantization import Config
from vllm_metal.identity.model_files import ModelLoadError

AGAIN = "config.json and the weights are from different checkpoints. Download both again"


@dataclass(frozen=True)
class Tensors:
    """Headers of stored tensors by name."""

    headers: Mapping[str, Header]

    def __contains__(self, name: str) -> bool:
        return name in self.headers

    def shape(self, name: str) -> tuple[int, ...]:
        return self.headers[name].shape

    def dtype(self, name: str) -> str:
        return self.headers[name].dtype

    def parts(self, **names: str) -> dict[str, str]:
        """Selects the names that exist; `names` maps parts of a weight to tensor names."""
        return {part: name for part, name in names.items() if name in self.headers}


def contradiction(name: str, found: str, stated: str) -> ModelLoadError:
    return ModelLoadError(f"{name} {found}, but quantization_config sets {stated}: {AGAIN}.")


def group_size(settings: Config) -> int | None:
    """Returns the configured columns per scale; None for whole rows, or if not configured."""
    stated = settings.get("group_size") or settings.get("q_group_size")
    return int(stated) if stated is not None and int(stated) > 0 else None


def check_groups(name: str, num_in: int, groups: int, size: int | None) -> None:
    expected = 1 if size is None else -(-num_in // size)
    if groups != expected:
        raise contradiction(
            name, f"has {groups} scales for {num_in} inputs", f"group_size={size or -1}"
        )
