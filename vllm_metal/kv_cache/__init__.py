# SPDX-License-Identifier: Apache-2.0
"""KV cache: what layers keep between steps, and the pool of blocks that holds it."""
