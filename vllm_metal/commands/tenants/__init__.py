# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal tenants`: makes, removes and lists the API keys of tenants."""
