# SPDX-License-Identifier: Apache-2.0
"""What layers keep between steps: the protocol, the storage of K and V, vLLM's placement of it."""
