# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: proposers draft the next tokens, the target model verifies them."""
