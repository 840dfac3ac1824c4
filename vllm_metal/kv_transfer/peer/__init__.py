# SPDX-License-Identifier: Apache-2.0
"""Pages of K/V between two engines. Blocking, thread-safe; knows no MLX, no pool, no scheduler."""
