# SPDX-License-Identifier: Apache-2.0
"""Gives an idle engine's memory back, and takes it again for the next request."""
