# SPDX-License-Identifier: Apache-2.0
"""What vLLM's offloading connector makes its scheduler's side from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
)

from vllm_metal.kv_transfer.manager import PageManager
from vllm_metal.kv_transfer.metrics import DEFINITIONS
from vllm_metal.settings import salts, secret_file

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingMetricMetadata


class MetalOffloadingSpec(OffloadingSpec):
    """Pages outside the pool; the settings stand in kv_connector_extra_config."""

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return dict(DEFINITIONS)

    def get_manager(self) -> OffloadingManager:
        salt_key = self.extra_config.get("salt_key")
        return PageManager(
            None if salt_key is None else secret_file.read(Path(salt_key), salts.SALT_KEY)
        )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        raise NotImplementedError("MetalWorker moves blocks itself, by TransferHooks")
