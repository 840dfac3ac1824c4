# SPDX-License-Identifier: Apache-2.0
"""Images: vision towers, their cached outputs, and the positions of image tokens."""
