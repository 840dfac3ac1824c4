# SPDX-License-Identifier: Apache-2.0
"""Processes that the doctor starts and judges by what they say and how they end."""
