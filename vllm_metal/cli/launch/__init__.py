# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal launch`: runs a coding agent with a model of this machine."""
