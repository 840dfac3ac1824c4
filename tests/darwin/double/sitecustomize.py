# SPDX-License-Identifier: Apache-2.0
"""Installs the double; Python imports this at startup if this folder leads PYTHONPATH."""

import darwin_double

darwin_double.install()
