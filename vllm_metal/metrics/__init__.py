# SPDX-License-Identifier: Apache-2.0
"""Figures of steps: a worker measures them, and vLLM's server shows them in /metrics and its log.

They travel within vLLM's own SchedulerStats. docs/monitoring.md says what each one means.
"""
