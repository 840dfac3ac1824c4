# SPDX-License-Identifier: Apache-2.0
"""Processes that the doctor starts; it judges them by their messages and how they end."""
