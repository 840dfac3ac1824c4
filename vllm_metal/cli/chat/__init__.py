# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal chat`: a page to talk in, or the terminal.

The page and its small server are here, the terminal is in `terminal`.
"""
