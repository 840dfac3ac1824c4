# SPDX-License-Identifier: Apache-2.0
"""Times `LLM` in this process on Linux, alone and beside two programs that never wait.

    python benchmarks/busy_neighbors.py

OpenMP's threads must not spin on cores that others need (vllm_metal/device/openmp.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_METAL_DEVICE", "cpu")

from vllm import LLM, SamplingParams

from vllm_metal.engine.models.embedded import embedded_model_path

NUM_REQUESTS, NUM_TOKENS, NUM_PROMPT = 8, 24, 50
SPIN = "while True: pass"


def seconds(llm: LLM, seed: int, neighbors: int) -> float:
    """Returns the time of NUM_REQUESTS requests with new prompts."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    starts = range(1000 * seed, 1000 * seed + 100 * NUM_REQUESTS, 100)
    prompts = [{"prompt_token_ids": list(range(at, at + NUM_PROMPT))} for at in starts]
    with ExitStack() as stack:
        for _ in range(neighbors):
            spinning = subprocess.Popen([sys.executable, "-c", SPIN])
            stack.callback(spinning.wait)
            stack.callback(spinning.kill)
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began


def main() -> None:
    llm = LLM(str(embedded_model_path(dequantize=True)), max_model_len=512)
    seconds(llm, 1, 0)
    alone, beside = seconds(llm, 2, 0), seconds(llm, 3, 2)
    print(f"alone {alone:.1f} s, beside two busy programs {beside:.1f} s: {beside / alone:.1f}")


if __name__ == "__main__":
    main()
