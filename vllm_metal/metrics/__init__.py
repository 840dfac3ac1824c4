# SPDX-License-Identifier: Apache-2.0
"""Step metrics: a worker measures them; vLLM's server shows them in /metrics and its log.

They travel in vLLM's SchedulerStats; docs/monitoring.md explains each one.
"""
