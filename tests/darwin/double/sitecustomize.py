# SPDX-License-Identifier: Apache-2.0
"""Python imports this at its start where this folder leads PYTHONPATH, in children too."""

import darwin_double

darwin_double.install()
