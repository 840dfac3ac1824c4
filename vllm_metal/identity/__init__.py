# SPDX-License-Identifier: Apache-2.0
"""Facts and digests: which model a name means, which files it has, what an engine computes."""
