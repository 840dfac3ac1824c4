# SPDX-License-Identifier: Apache-2.0
"""Layers' state between steps: its interface, the storage of K and V, and its place in the pool."""
