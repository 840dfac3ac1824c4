# SPDX-License-Identifier: Apache-2.0
"""Says why a prompt was not found in the prefix cache, though one like it had been asked before."""
