# SPDX-License-Identifier: Apache-2.0
"""Takes states of recurrent layers through the rows of a step."""
