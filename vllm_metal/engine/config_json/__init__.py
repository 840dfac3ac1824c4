# SPDX-License-Identifier: Apache-2.0
"""Checks config.json: whether each key is computed as it asks."""
