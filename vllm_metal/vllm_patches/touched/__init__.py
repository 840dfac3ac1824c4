# SPDX-License-Identifier: Apache-2.0
"""The table of every name of vLLM's that this plugin imports, extends, replaces, calls or reads.

tests/vllm_patches/test_touched.py compares it with the sources.
"""

from vllm_metal.vllm_patches.touched.engine import ENGINE
from vllm_metal.vllm_patches.touched.entry import GPU_WORKER, Touched
from vllm_metal.vllm_patches.touched.metrics import METRICS
from vllm_metal.vllm_patches.touched.options import OPTIONS
from vllm_metal.vllm_patches.touched.serving import SERVING
from vllm_metal.vllm_patches.touched.transfers import TRANSFERS

TOUCHED = (*OPTIONS, *ENGINE, *TRANSFERS, *SERVING, *METRICS)

__all__ = ["GPU_WORKER", "TOUCHED", "Touched"]
