# SPDX-License-Identifier: Apache-2.0
"""Operations on paged K/V, from arrays to arrays, without vLLM."""
