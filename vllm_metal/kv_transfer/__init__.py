# SPDX-License-Identifier: Apache-2.0
"""K/V that outlive the process: a prefix cache on disk."""
