# SPDX-License-Identifier: Apache-2.0
"""Blocks of K/V as checksummed files, written once, evicted by size, and shared by engines."""
