# SPDX-License-Identifier: Apache-2.0
"""Tensor and pipeline parallelism: process groups, sharding and heartbeats of ranks."""
