# SPDX-License-Identifier: Apache-2.0
"""All that changes vLLM or meets its changes: each with its reason, and the releases it is for."""
