# SPDX-License-Identifier: Apache-2.0
"""Bidirectional encoders, which read a whole text at once."""
