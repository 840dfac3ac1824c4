# SPDX-License-Identifier: Apache-2.0
"""Chooses vLLM's tool-call and reasoning parsers by a model's own files."""
