# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's modules whose layers compute the same as stages, one after another, as as one model.

tests/models/test_stage.py cuts a small model of each module at every layer, and compares the logits
with those of mlx-lm's own dense forward. This is the list of those that were shown equal.
"""

STAGED = frozenset(("llama",))
