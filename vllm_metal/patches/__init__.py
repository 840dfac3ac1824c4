# SPDX-License-Identifier: Apache-2.0
"""All changes to the hosts, vLLM and MLX; nothing else changes them."""
