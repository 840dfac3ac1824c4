# SPDX-License-Identifier: Apache-2.0
"""Names that we use to show figures of steps in the server's metrics and log."""

from __future__ import annotations

from vllm_metal.vllm_patches.touched.entry import Touched

METRICS = (
    Touched(
        "vllm.distributed.ec_transfer.ec_connector.metrics:ECConnectorStats",
        by="metrics/figures.py",
        called="data",
    ),
    Touched(
        "vllm.v1.outputs:ECConnectorOutput", by="metrics/figures.py", called="ec_connector_stats="
    ),
    Touched(
        "vllm.v1.metrics.stats:SchedulerStats",
        by="metrics/figures.py metrics/stat_logger.py",
        fields="ec_connector_stats prefix_cache_stats spec_decoding_stats",
    ),
    Touched(
        "vllm.v1.spec_decode.metrics:SpecDecodingStats",
        by="metrics/stat_logger.py",
        fields="num_draft_tokens num_accepted_tokens",
    ),
    Touched("vllm.v1.metrics.stats:IterationStats", by="metrics/stat_logger.py"),
    Touched("vllm.v1.metrics.stats:MultiModalCacheStats", by="metrics/stat_logger.py"),
    Touched(
        "vllm.v1.metrics.stats:CachingMetrics",
        by="metrics/stat_logger.py",
        called="",
        fields="empty hit_rate",
        calls={"observe": "stats"},
    ),
    Touched(
        "vllm.v1.metrics.loggers:AggregateStatLoggerBase",
        by="metrics/stat_logger.py vllm_patches/stat_loggers.py",
        methods={
            "__init__": "vllm_config engine_indexes",
            "record": "scheduler_stats iteration_stats mm_cache_stats engine_idx",
            "log": "",
            "log_engine_initialized": "",
        },
    ),
    Touched(
        "vllm.v1.metrics.loggers:StatLoggerManager",
        by="vllm_patches/stat_loggers.py",
        # It sets `stat_loggers` and `engine_indexes`, which are used.
        methods={
            "__init__": "vllm_config engine_idxs custom_stat_loggers enable_default_loggers "
            "aggregate_engine_logging client_count"
        },
    ),
)
