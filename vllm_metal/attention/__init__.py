# SPDX-License-Identifier: Apache-2.0
"""The seam into mlx-lm models: their cache protocol, answered from the paged pool."""
