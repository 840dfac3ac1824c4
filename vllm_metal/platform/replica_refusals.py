# SPDX-License-Identifier: Apache-2.0
"""Rejects settings that conflict with data parallelism, in which ranks are independent engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def replica_refusals(config: VllmConfig) -> dict[str, bool]:
    """Maps each setting, in the words of the start error, to whether it must be rejected.

    `config` is that of a server or launcher; in an engine's own process it has one rank.
    """
    parallel, model = config.parallel_config, config.model_config
    if parallel.data_parallel_size == 1:
        return {}
    local = parallel.data_parallel_size_local
    transfer = config.kv_transfer_config
    extra = {} if transfer is None else transfer.kv_connector_extra_config
    return {
        "--data-parallel-external-lb, --data-parallel-rank, or --data-parallel-hybrid-lb with "
        "--data-parallel-size-local 1 (a rank needs none of the others: start independent servers, "
        "without --data-parallel-*, behind a router)": parallel.data_parallel_external_lb,
        "VLLM_DP_SIZE (unset it, and split the prompts among your own processes)": (
            parallel.data_parallel_rank_local is not None
        ),
        f"--data-parallel-backend {parallel.data_parallel_backend} (start the ranks of other "
        "machines there, with --headless)": parallel.data_parallel_backend != "mp",
        f"--kv-transfer-config 'listen' with --data-parallel-size-local {local} (each rank needs a "
        "port of its own: start a server each, without --data-parallel-*)": (
            local > 1 and extra.get("listen") is not None
        ),
        "--enable-mfu-metrics with --data-parallel-size, of a model with experts (vLLM does not "
        "know of the experts and would count wrongly: leave it out)": (
            config.observability_config.enable_mfu_metrics and model is not None and model.is_moe
        ),
    }
