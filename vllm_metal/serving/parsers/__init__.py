# SPDX-License-Identifier: Apache-2.0
"""The choice of vLLM's tool-call and reasoning parser, made of a model's own files."""
