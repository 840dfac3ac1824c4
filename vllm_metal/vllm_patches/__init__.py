# SPDX-License-Identifier: Apache-2.0
"""All that changes vLLM, or the torch it runs on: each change with its reason."""
