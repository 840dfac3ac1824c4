# SPDX-License-Identifier: Apache-2.0
"""Response cache: answers exact repeats of a request without the engine."""
