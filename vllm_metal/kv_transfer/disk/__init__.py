# SPDX-License-Identifier: Apache-2.0
"""Blocks of K/V as files: written once, checksummed, evicted by bytes, shared by engines."""
