# SPDX-License-Identifier: Apache-2.0
"""Resolves model names to files, and digests what an engine's results depend on."""
