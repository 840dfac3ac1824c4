# SPDX-License-Identifier: Apache-2.0
"""Judges config.json: whether each key is computed as it asks."""
