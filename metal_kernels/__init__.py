# SPDX-License-Identifier: Apache-2.0
"""Operations on paged K/V: arrays in, arrays out; knows nothing of vLLM."""
