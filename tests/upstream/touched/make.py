# SPDX-License-Identifier: Apache-2.0
"""Makes the content of touched.json."""

from upstream.touched.reader import Reader
from upstream.touched.sources import read_all
from upstream.touched.table import Table

#: What the syntax of our sources does not show: values of Literals, keys, and what is reached
#: through objects without a type. By the file: names, with their arguments where they are called.
BESIDES = {
    "attention/attention_layer.py": {
        "vllm.v1.kv_cache_interface:KVQuantMode": "NONE FP8_PER_TOKEN_HEAD INT8_PER_TOKEN_HEAD",
    },
    "kv_cache/specs.py": {  # through `dataclasses.replace` of specs of any kind
        "vllm.v1.kv_cache_interface:FullAttentionSpec": "page_size_padded",
        "vllm.v1.kv_cache_interface:MambaSpec": "page_size_padded",
        "vllm.v1.kv_cache_interface:SlidingWindowSpec": "page_size_padded",
    },
    "platform/metal_platform.py": {"vllm.config.cache:CacheDType": "int8_per_token_head"},
    "sample/custom.py": {
        "vllm.v1.sample.logits_processor:LogitsProcessor": "update_state(batch_update)"
    },
    "sample/sampler.py": {
        "vllm.config.model:LogprobsMode": "raw_logits raw_logprobs processed_logits "
        "processed_logprobs"
    },
    "serving/response_cache/rendering.py": {  # `serving_render` of the application's state
        "vllm.entrypoints.scale_out.render.serving:ServingRender": "render_chat_request(request) "
        "render_completion_request(request) render_messages_request(request)"
    },
    "spec_decode/registry.py": {
        "vllm.config.speculative:SpeculativeMethod": "ngram ngram_gpu suffix draft_model eagle "
        "eagle3 mtp medusa mlp_speculator"
    },
    "vllm_patches/environment.py": {
        "vllm.envs:environment_variables": "VLLM_USE_V2_MODEL_RUNNER VLLM_COMPUTE_NANS_IN_LOGITS"
    },
    "vllm_patches/processes.py": {
        "vllm.envs:environment_variables": "VLLM_WORKER_MULTIPROC_METHOD "
        "VLLM_ENABLE_V1_MULTIPROCESSING"
    },
    "worker/worker.py": {"vllm.tasks:SupportedTask": "generate"},
}


def make() -> str:
    """Reads our sources and the installed vLLM, and returns the content of touched.json."""
    sources = read_all()
    names: dict[type, str] = {}
    for found in sorted(
        (found for source in sources for found in source.names.values()),
        key=lambda found: (len(found.name), found.name),
    ):
        if isinstance(found.value, type):
            names.setdefault(found.value, found.name)
    for _ in range(2):  # types of our classes' attributes come from other files' classes
        table = Table(names)
        for source in sources:
            Reader(source, table).read()
    for by, listed in BESIDES.items():
        for owner, attributes in listed.items():
            for attribute in attributes.split():
                name, called, arguments = attribute.rstrip(")").partition("(")
                full = table.attribute(owner, name, by)
                assert full is not None, f"{owner}.{name} is not in vLLM"
                if called:
                    table.note(full, by, called=arguments.replace(",", " "))
    return table.text()
