# SPDX-License-Identifier: Apache-2.0
"""One model on several ranks: their process groups, and how each knows that the others live."""
