# SPDX-License-Identifier: Apache-2.0
"""Which model a name means, which files it has, and digests of what an engine computes."""
