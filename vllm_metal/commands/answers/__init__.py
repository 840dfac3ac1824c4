# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal answers`: kept answers of a server."""
