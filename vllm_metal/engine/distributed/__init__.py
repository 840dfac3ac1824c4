# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel and pipeline parallel: process groups, sharding, and heartbeats of the ranks."""
