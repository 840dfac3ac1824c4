# SPDX-License-Identifier: Apache-2.0
"""K/V of full blocks, out of the pool and back into it: a prefix cache that outlives the engine."""
