# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal cache`: what is in a prefix cache on disk."""
