# SPDX-License-Identifier: Apache-2.0
"""A step's requests as one ragged batch: what persists, what goes in, what comes out."""
