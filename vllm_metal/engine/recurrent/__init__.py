# SPDX-License-Identifier: Apache-2.0
"""Per-request state of recurrent layers, and its steps."""
