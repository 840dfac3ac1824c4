# SPDX-License-Identifier: Apache-2.0
"""Response cache: serves exact repeats of a request without the engine."""
