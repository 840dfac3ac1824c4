# SPDX-License-Identifier: Apache-2.0
"""What a user sets: environment variables, options, and what is to be installed."""
