# SPDX-License-Identifier: Apache-2.0
"""What vLLM asks of a platform."""
