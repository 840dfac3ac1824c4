# SPDX-License-Identifier: Apache-2.0
"""What a user sets: environment variables and options; how optional parts are installed."""
