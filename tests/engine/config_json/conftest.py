# SPDX-License-Identifier: Apache-2.0
from engine.models.unfused import unfused  # noqa: F401 - pytest finds it here
