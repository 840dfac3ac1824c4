# SPDX-License-Identifier: Apache-2.0
"""Names that --kv-cache-dtype accepts."""

_ALIASES = {
    "fp8": "fp8_per_token_head",
    "fp8_e4m3": "fp8_per_token_head",
    "int8": "int8_per_token_head",
}


def canonical(cache_dtype: str) -> str:
    """Resolves aliases of --kv-cache-dtype to vLLM's name; unknown names are returned as given."""
    return _ALIASES.get(cache_dtype, cache_dtype)
