# SPDX-License-Identifier: Apache-2.0
"""Estimates a model's memory from config.json and the headers of its weight files."""
