# SPDX-License-Identifier: Apache-2.0
"""State that recurrent layers keep per request, and its steps."""
