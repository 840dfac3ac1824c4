"""Names that other programs read: renaming one breaks dashboards, clients, peers or files."""

import ast
import dataclasses
import re
from pathlib import Path

import msgspec
import pytest

import vllm_metal
from vllm_metal.kv_transfer.disk import layout
from vllm_metal.kv_transfer.peer import messages
from vllm_metal.serving import tenants_file
from vllm_metal.settings.additional_config import AdditionalConfig

#: Metrics of ours; a metric that is deleted or renamed goes into the changelog.
METRICS = {
    *("generation_tokens_total", "kv_cache_usage_perc", "num_requests_running"),
    *("num_requests_waiting", "prefix_cache_hits_total", "prefix_cache_queries_total"),
    *("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"),
    *("kv_outbox_bytes", "kv_outbox_evicted", "kv_outbox_leased_bytes", "kv_outbox_limit_bytes"),
    *("kv_outbox_refused", "kv_peer_corrupt_pages", "kv_peer_failed_fetches"),
    *("kv_peer_fetched_bytes", "kv_peer_sent_bytes", "kv_pull_choices", "kv_pulls_failed"),
    *("kv_shared_bytes", "kv_shared_leased_pages", "kv_shared_pages"),
    *("metal_device_memory_bytes", "metal_device_seconds", "metal_failed_steps"),
    *("metal_image_seconds", "metal_images_encoded", "metal_memory_budget_bytes"),
    *("metal_step_device_seconds", "metal_step_host_seconds", "metal_table_read_bytes"),
    *("prefix_cache_disk_bytes", "prefix_cache_disk_corrupt", "prefix_cache_disk_dropped"),
    *("prefix_cache_disk_evicted", "prefix_cache_disk_limit_bytes"),
    *("prefix_cache_disk_read_bytes", "prefix_cache_disk_written_bytes"),
    *("prefix_cache_disk_written_today_bytes", "prefix_cache_lost_tokens"),
    *("request_duration_seconds", "request_timeouts"),
    *("response_cache_bytes", "response_cache_requests", "tenant_requests", "tenant_tokens"),
}
VARIABLES = {
    *("ALLOW_UNTESTED", "CACHE", "CLANG", "DEVICE", "GGUF_INEXACT", "KERNELS", "LAUNCH_KEY"),
    "SERVING_CONFIG",
}
HEADERS = {"x-cache", "x-ignored-fields"}
ADDITIONAL_CONFIG = {
    *(
        "choose_parsers",
        "dense_check",
        "draft_quantization",
        "drafts",
        "embedding_tables",
        "explain_prefix_misses",
        "fixed_draft_length",
    ),
    *("fixed_splits", "idle_sleep", "idle_sleep_weights", "keep_awake", "max_step_ms"),
    *("normalize_prompts", "prefix_cache_bytes", "prefix_cache_daily_writes"),
    *("prefix_cache_dir", "prefix_cache_salt_key", "prompt_lookup", "wire_memory"),
}
MESSAGES = {
    *("Ask", "Busy", "Done", "Fetch", "Found", "Greeting", "NoPage", "Offer", "Proof"),
    *("Release", "Renew", "Row", "Stranger", "Waiting", "Welcome"),
}


def constants(pattern: str) -> set[str]:
    """Returns the first groups of string constants of the package that match a pattern."""
    sources = Path(vllm_metal.__file__).parent.rglob("*.py")
    nodes = (node for path in sources for node in ast.walk(ast.parse(path.read_text())))
    texts = (n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return {match[1] for text in texts if (match := re.fullmatch(pattern, text))}


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (METRICS, r"vllm:([a-z0-9_]+)"),
        (VARIABLES, r"VLLM_METAL_([A-Z0-9_]+)"),
        (HEADERS, r"(x-[a-z-]+)"),
    ],
    ids=["metrics", "variables", "headers"],
)
def test_names_in_the_code(names, pattern):
    assert constants(pattern) == names


def test_keys_of_settings_and_files():
    assert {field.name for field in dataclasses.fields(AdditionalConfig)} == ADDITIONAL_CONFIG
    key = {"id", "tenant", "purpose", "sha256", "made", "generation"}
    assert {field.name for field in dataclasses.fields(tenants_file.Key)} == key
    assert (*("ledger", "engines", "manifest.json"),) == (
        layout.LEDGER,
        layout.ENGINES,
        layout.MANIFEST,
    )


def test_messages_between_engines():
    """Their tags are class names; the version covers the order of the fields."""
    found = {each.__name__ for each in messages.Message.__subclasses__()}
    assert {
        msgspec.inspect.type_info(each).tag for each in messages.Message.__subclasses__()
    } == found
    assert found == MESSAGES
