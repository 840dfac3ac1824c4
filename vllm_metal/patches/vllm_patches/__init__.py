# SPDX-License-Identifier: Apache-2.0
"""All changes to vLLM and to the torch it runs on; each module says why it is needed.

docs/compatibility.md says when each can be removed.
"""
