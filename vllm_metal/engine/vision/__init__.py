# SPDX-License-Identifier: Apache-2.0
"""Images in the engine's process: towers, their outputs by hash, rows and positions of images."""
