# SPDX-License-Identifier: Apache-2.0
"""Finds, on the machine it runs on, what kernels are quickest with."""
