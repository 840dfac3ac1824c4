# SPDX-License-Identifier: Apache-2.0
"""KV cache: what layers need, the pool arrays, the memory budget."""
