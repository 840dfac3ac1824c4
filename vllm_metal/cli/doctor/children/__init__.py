# SPDX-License-Identifier: Apache-2.0
"""Child processes of the doctor, judged by their messages and how they end."""
