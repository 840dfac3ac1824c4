# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker: its lifecycle, the calls of a step, and recovery from failed steps."""
