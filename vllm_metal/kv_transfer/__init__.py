# SPDX-License-Identifier: Apache-2.0
"""KV connector: a prefix cache on disk and on peers, which outlives the pool and the engine."""
