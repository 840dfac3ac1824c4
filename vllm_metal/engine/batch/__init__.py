# SPDX-License-Identifier: Apache-2.0
"""A step's requests as one ragged batch: per-request state, inputs and outputs."""
