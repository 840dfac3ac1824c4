# SPDX-License-Identifier: Apache-2.0
"""Answers to exact repeats, without the engine."""
