# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: guesses of the next tokens, verified by the target model."""
