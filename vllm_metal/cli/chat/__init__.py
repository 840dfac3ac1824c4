# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal chat`: a web page to chat in, and its small server."""
