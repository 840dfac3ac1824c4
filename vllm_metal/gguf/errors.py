# SPDX-License-Identifier: Apache-2.0
"""The error that a conversion raises."""


class ConversionError(ValueError):
    """A GGUF file cannot be converted, or not with these options; the message says what to do."""
