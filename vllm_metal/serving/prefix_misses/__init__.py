# SPDX-License-Identifier: Apache-2.0
"""Explains prefix-cache misses of prompts that resemble earlier ones."""
