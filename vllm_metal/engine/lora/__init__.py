# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: files, tensor names, slots, and updates of layers."""
