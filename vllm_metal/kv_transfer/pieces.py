# SPDX-License-Identifier: Apache-2.0
"""The size of the pieces that pages are read in, which both sides of the connector reckon with."""

#: Pages are read in pieces of so many bytes, one at least. A piece enters the pool before a step
#: while others decode.
PIECE_BYTES = 8 << 20
