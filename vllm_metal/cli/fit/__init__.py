# SPDX-License-Identifier: Apache-2.0
"""Estimates how much memory a model needs, from config.json and the headers of weight files."""
