# SPDX-License-Identifier: Apache-2.0
"""A chat in the terminal, with the engine in the same process."""
