# SPDX-License-Identifier: Apache-2.0
"""All that changes vLLM, or the torch it runs on: each module says why; all for the tested release.

tests/vllm_patches/test_needed.py runs vLLM without the changes; it fails where vLLM needs one no
more.
"""
