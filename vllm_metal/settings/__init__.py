# SPDX-License-Identifier: Apache-2.0
"""User settings: environment variables, options, and how optional parts are installed."""
