# SPDX-License-Identifier: Apache-2.0
"""Runs mlx-vlm's splitter of MTP layers in its own process.

Its import changes transformers' image processors, which other tests use.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import cache


@cache
def _process():
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def split(target, folder, **options):
    """Writes a target's MTP layers into their own folder, and returns it."""
    return _process().submit(_split, str(target), str(folder), options).result()


def _split(target, folder, options):
    from mlx_vlm.split_mtp import split_mtp

    return split_mtp(target, folder, **options)
