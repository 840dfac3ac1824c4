# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's modules that the paged path could not serve as they are.

They compute with rows of many texts what they compute with one text: the reference is mlx-lm's own
forward. transformers has no classes of these families.
"""

from __future__ import annotations

from vllm_metal.mlx_patches.families.llama4 import llama4
from vllm_metal.mlx_patches.families.plamo import plamo, plamo2, plamo3
from vllm_metal.mlx_patches.families.shared_kv import afm7, iquestloopcoder
from vllm_metal.mlx_patches.families.states import baichuan_m1, longcat_flash_ngram
from vllm_metal.mlx_patches.patch import ModulePatch

_READ = ((0, 32),)

PATCHES = (
    ModulePatch("afm7", _READ, afm7),
    ModulePatch("baichuan_m1", _READ, baichuan_m1),
    ModulePatch("iquestloopcoder", _READ, iquestloopcoder),
    ModulePatch("llama4", _READ, llama4),
    ModulePatch("longcat_flash_ngram", _READ, longcat_flash_ngram),
    ModulePatch("plamo", _READ, plamo),
    ModulePatch("plamo2", _READ, plamo2),
    ModulePatch("plamo3", _READ, plamo3),
)
