# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal doctor`: tries what users do, and writes a report to attach to a bug report.

What could fail to import, hang or crash runs in processes of its own (`children`), so that each
costs its finding and no more. Nothing imported here imports MLX, torch or vLLM.
"""

from vllm_metal.commands.doctor.run import PARTS, run

__all__ = ["PARTS", "run"]
