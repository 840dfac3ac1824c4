# SPDX-License-Identifier: Apache-2.0
"""All that changes vLLM, or the torch it runs on: each module says why; all for the tested release.

docs/compatibility.md says when each can be removed.
"""
