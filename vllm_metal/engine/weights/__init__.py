# SPDX-License-Identifier: Apache-2.0
"""Reads weights as they are published, and turns them into what MLX multiplies with.

`files` finds and checks files. `judge` reads config.json and tensor headers and returns a plan: how
each weight is stored. One module a format (`fp8`, `nvfp4`, `mxfp4`, `integers`) turns the stored
arrays of a weight into a `packed.Packed` or a dense array. `placing` puts these into a model.
"""
