# SPDX-License-Identifier: Apache-2.0
"""vLLM's platform interface, and all checks of the configuration."""
