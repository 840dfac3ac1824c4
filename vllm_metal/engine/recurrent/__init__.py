# SPDX-License-Identifier: Apache-2.0
"""Per-request state of recurrent layers: its storage in the pool, and plans of its updates."""
