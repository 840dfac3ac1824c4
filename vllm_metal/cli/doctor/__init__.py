# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal doctor`: checks what serving needs, and writes a report for bug reports.

Whatever may fail to import, hang or crash runs in a child process (`children`), so that the doctor
can continue and report how the child ended. Nothing imported here imports MLX, torch or vLLM.
"""
