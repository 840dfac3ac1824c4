# SPDX-License-Identifier: Apache-2.0
"""The one error a conversion reports to its caller."""


class ConversionError(ValueError):
    """A GGUF file (or a setting) that cannot be converted; the message says what to do."""
