# SPDX-License-Identifier: Apache-2.0
"""ConversionError: a file that cannot be converted, with the reason."""


class ConversionError(ValueError):
    """A GGUF file cannot be converted, or not with these options; the message says what to do."""
