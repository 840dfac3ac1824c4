# SPDX-License-Identifier: Apache-2.0
"""Reads published weights and converts them to MLX's formats.

`files` finds and checks files. `judge` reads config.json and tensor headers, and plans how to read
each weight. One module per format (`fp8`, `nvfp4`, `mxfp4`, `integers`) converts a weight's stored
arrays to a `packed.Packed` or a dense array. `placing` puts the weights into a model.
"""
