# SPDX-License-Identifier: Apache-2.0
"""Names that we use where K/V leave the pool and come back: vLLM's offloading connector."""

from __future__ import annotations

from vllm_metal.vllm_patches.touched.entry import GPU_WORKER, Touched

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
_OFFLOADING = f"{_CONNECTORS}.offloading"

_CONNECTOR = (
    Touched(
        f"{_CONNECTORS}:KVConnectorRole", by="kv_transfer/connector.py", fields="SCHEDULER WORKER"
    ),
    Touched(
        f"{_CONNECTORS}.offloading_connector:OffloadingConnector",
        by="kv_transfer/connector.py",
        called="vllm_config role kv_cache_config",
        fields="scheduler",
        methods={
            "set_xfer_handshake_metadata": "metadata",
            "on_new_request": "request",
            "get_num_new_matched_tokens": "request num_computed_tokens",
            "request_finished_all_groups": "request block_ids",
            "update_state_after_alloc": "request blocks num_external_tokens",
            "build_connector_meta": "scheduler_output",
            "update_connector_output": "connector_output",
            "reset_cache": "",
        },
    ),
    Touched(f"{_CONNECTORS}.base:KVConnectorHandshakeMetadata", by="kv_transfer/messages.py"),
    Touched(f"{_CONNECTORS}.base:KVConnectorMetadata", by="kv_transfer/connector.py"),
    Touched(
        f"{GPU_WORKER}:Worker",
        by="worker/worker.py",
        methods={"get_kv_connector_handshake_metadata": ""},
    ),
    Touched(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler",
        by="kv_transfer/connector.py",
        called="spec vllm_config kv_cache_config",
        methods={},
        calls={"build_connector_meta": "scheduler_output"},
    ),
    Touched(
        f"{_OFFLOADING}.scheduler:GroupOffloadConfig",
        by="kv_transfer/connector.py",
        fields="group_idx tokens_per_block",
        calls={"load_window_size_in_chunks": "num_tokens"},
    ),
    Touched(
        f"{_OFFLOADING}.scheduler:RequestOffloadState",
        by="kv_transfer/connector.py",
        fields="req_context group_states transfer_jobs",
    ),
    Touched(
        f"{_OFFLOADING}.scheduler:RequestGroupState",
        by="kv_transfer/connector.py",
        fields="offload_keys next_stored_chunk_idx block_ids",
    ),
    Touched(
        f"{_OFFLOADING}.common:OffloadingConnectorMetadata",
        by="kv_transfer/messages.py",
        called="load_jobs store_jobs jobs_to_flush",
        fields="load_jobs store_jobs jobs_to_flush",
    ),
    Touched(
        f"{_OFFLOADING}.common:OffloadingWorkerMetadata",
        by="kv_transfer/transfer_hooks.py",
        called="",
        fields="transfer_stats completed_jobs",
        calls={"mark_completed": "job_id"},
    ),
    Touched(
        f"{_OFFLOADING}.common:TransferJob",
        by="kv_transfer/transfer_hooks.py",
        fields="req_id src_spec dst_spec",
    ),
    Touched(
        f"{_OFFLOADING}.metrics:OffloadingConnectorStats",
        by="kv_transfer/store.py kv_transfer/manager.py",
        called="",
        calls={
            "set_gauge": "gauge_name gauge_value",
            "increase_counter": "counter_name counter_increase_value",
        },
    ),
    Touched("vllm.v1.core.kv_cache_manager:KVCacheBlocks", by="kv_transfer/connector.py"),
    Touched("vllm.v1.kv_cache_interface:KVCacheConfig", by="kv_transfer/connector.py"),
)

_OFFLOAD = "vllm.v1.kv_offload"
_MANAGER = (
    Touched(
        f"{_OFFLOAD}.base:OffloadingManager",
        by="kv_transfer/manager.py kv_transfer/manager.py",
        methods={
            "lookup": "key req_context",
            "get_load_source": "key req_context",
            "prepare_load": "keys req_context",
            "prepare_store": "keys req_context",
            "complete_load": "keys req_context",
            "complete_store": "keys req_context success",
            "on_request_finished": "req_context",
            "on_new_request": "req_context",
            "get_stats": "",
        },
    ),
    Touched(
        f"{_OFFLOAD}.base:OffloadingSpec",
        by="kv_transfer/manager.py",
        methods={
            "build_metric_definitions": "extra_config",
            "get_manager": "",
            "get_worker": "kv_caches",
        },
    ),
    Touched(
        f"{_OFFLOAD}.factory:OffloadingSpecFactory",
        by="kv_transfer/connector.py",
        calls={"register_spec": "name module_path class_name"},
    ),
    Touched(
        f"{_OFFLOAD}.base:ReqContext",
        by="kv_transfer/manager.py",
        fields="req_id kv_transfer_params",
        calls={"set_state": "val", "get_state": "cls", "get_offload_key_position": "key"},
    ),
    Touched(f"{_OFFLOAD}.base:RequestOffloadingContext", by="kv_transfer/manager.py", called=""),
    Touched(
        f"{_OFFLOAD}.base:PrepareStoreOutput",
        by="kv_transfer/manager.py",
        called="keys_to_store store_spec evicted_keys",
    ),
    Touched(f"{_OFFLOAD}.base:LookupResult", by="kv_transfer/manager.py", fields="HIT MISS"),
    Touched(f"{_OFFLOAD}.base:LoadStoreSpec", by="kv_transfer/messages.py"),
    Touched(
        f"{_OFFLOAD}.base:GPULoadStoreSpec", by="kv_transfer/transfer_hooks.py", fields="block_ids"
    ),
    Touched(
        f"{_OFFLOAD}.base:OffloadKey",
        by="kv_transfer/connector.py kv_transfer/manager.py kv_transfer/stores.py "
        "kv_transfer/loads.py",
    ),
    Touched(
        f"{_OFFLOAD}.base:get_offload_group_idx",
        by="kv_transfer/stores.py kv_transfer/loads.py",
        called="key",
    ),
    Touched(
        f"{_OFFLOAD}.base:make_offload_key",
        by="kv_transfer/connector.py",
        called="block_hash group_idx",
    ),
    Touched(f"{_OFFLOAD}.base:CanonicalKVCaches", by="kv_transfer/manager.py"),
    Touched(f"{_OFFLOAD}.base:OffloadingWorker", by="kv_transfer/manager.py"),
    Touched(f"{_OFFLOAD}.base:OffloadingMetricMetadata", by="kv_transfer/store.py"),
    Touched(
        f"{_OFFLOAD}.base:OffloadingGaugeMetadata",
        by="kv_transfer/store.py",
        called="documentation",
    ),
    Touched(
        f"{_OFFLOAD}.base:OffloadingCounterMetadata",
        by="kv_transfer/store.py",
        called="documentation",
    ),
    Touched(
        "vllm.v1.metrics.cache_hit_source:CacheHitSource",
        by="kv_transfer/manager.py",
        fields="DISK P2P",
    ),
)

TRANSFERS = (*_CONNECTOR, *_MANAGER)
