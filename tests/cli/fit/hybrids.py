# SPDX-License-Identifier: Apache-2.0
"""Prints a Markdown table of the KV pool that drafts leave to 4-bit hybrids, by Mac.

`python tests/cli/fit/hybrids.py` reads no weights. It estimates as the engine does, for
steps of 256 tokens and without an explicit pool limit.
"""

from dataclasses import replace

import vllm_metal.platform.metal_platform  # noqa: F401  # first: it loads a BLAS before MLX

# isort: split
import torch
from published_shapes import GRANITE, QWEN_27B, QWEN_80B

from metal_kernels.layout import BLOCK_SIZES
from vllm_metal.cli.fit import engine
from vllm_metal.cli.fit.estimate import Model, estimate
from vllm_metal.cli.fit.machine import Machine

GIB = 2**30
MACS = (32, 64, 128)  # GB
DRAFTS = (0, 5)
REQUESTS = (4, 32)  # concurrent, --max-num-seqs
ROWS = 256  # --max-num-batched-tokens; 2,048 take no longer
MODELS = (QWEN_27B, QWEN_80B, GRANITE)


def estimated(known):
    """Estimates with drafts, for the maximum number of requests."""
    with known.folder() as path:
        model = Model.read(path, known.config["model_type"], torch.bfloat16)
        config = engine.config(
            model_type=known.config["model_type"],
            dtype=torch.bfloat16,
            cache_dtype="auto",
            block_size=BLOCK_SIZES[0],
            max_model_len=engine.longest_text(known.config),
            fitted=True,
            max_num_batched_tokens=ROWS,
            max_num_seqs=max(REQUESTS),
            num_drafts=max(DRAFTS),
        )
        return estimate(model, config, Machine.mac(MACS[-1] * GIB))


def on(memory, found, requests, drafts):
    """Repeats the estimate on a Mac for other settings."""
    machine = Machine.mac(memory * GIB)
    measured = replace(found.measured, total=machine.total, cache=machine.cache)
    settings = replace(found.settings, max_num_seqs=requests, num_drafts=drafts, most=None)
    return replace(found, measured=measured, settings=settings)


def cell(found):
    """Formats the GiB of the pool, and of a step's states."""
    states = -found.budget.as_json()["states"]
    return f"{max(found.pool, 0) / GIB:.2f} / {states / GIB:.2f}"


def rows(known):
    """Returns the table's rows."""
    found = estimated(known)
    name = f"{known.name} ({found.state_bytes / 2**20:.0f} MiB a state)"
    for requests in REQUESTS:
        for drafts in DRAFTS:
            cells = " | ".join(cell(on(memory, found, requests, drafts)) for memory in MACS)
            yield f"| {name}, {requests} requests, {drafts} drafts | {cells} |"


if __name__ == "__main__":
    print("| pool / states of a step, GiB | " + " | ".join(f"{each} GB" for each in MACS) + " |")
    print("| --- |" + " ---: |" * len(MACS))
    for each in MODELS:
        print("\n".join(rows(each)), flush=True)
