# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal fit`: whether a model fits, how many requests with it, and how to serve it so."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from vllm_metal import platform  # first: it loads a BLAS before anything imports MLX
from vllm_metal.fit import engine
from vllm_metal.fit.estimate import Estimate, Model, estimate
from vllm_metal.fit.machine import Machine
from vllm_metal.fit.source import folder
from vllm_metal.kv_cache import budget
from vllm_metal.models.weight_files import ModelLoadError

_GIB, _KIB = 2**30, 2**10
_NAMED_CHANGES = 3  # of those that would make it fit
