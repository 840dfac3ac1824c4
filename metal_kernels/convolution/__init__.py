# SPDX-License-Identifier: Apache-2.0
"""Takes causal convolutions of recurrent layers through the rows of a step."""
