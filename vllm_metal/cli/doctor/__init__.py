# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal doctor`: checks what serving needs, and writes a file to attach to a bug report.

Whatever may fail to import, hang or crash runs in a child process (`children`), so that the doctor
goes on and reports how the child ended. Nothing imported here imports MLX, torch or vLLM.
"""
