# SPDX-License-Identifier: Apache-2.0
"""Finds the fastest kernel settings for the machine it runs on."""
