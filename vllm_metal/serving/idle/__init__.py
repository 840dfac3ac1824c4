# SPDX-License-Identifier: Apache-2.0
"""Idle sleep: frees an idle engine's memory, and allocates it again for the next request."""
