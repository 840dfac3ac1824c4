# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal launch`: an agent of the user's, on a model of this machine."""
