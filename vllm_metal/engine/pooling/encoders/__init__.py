# SPDX-License-Identifier: Apache-2.0
"""Models that read a whole text at once, every token the ones behind it too."""
