# SPDX-License-Identifier: Apache-2.0
"""Turns one SchedulerOutput into tokens: the model, its K/V, sampling."""
