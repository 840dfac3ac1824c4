# SPDX-License-Identifier: Apache-2.0
"""Runs an engine in this process, as a user's script does: load, generate ten tokens, shut down.

python -m vllm_metal.commands.doctor.children.ten_tokens MODEL
"""

import argparse
import gc
import os
import time

from vllm_metal.commands.doctor.engine import KV_CACHE_BYTES, NUM_TOKENS, PROMPT
from vllm_metal.commands.doctor.messages import say


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    model = parser.parse_args().model
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    say(stage="starting")
    from vllm import LLM, SamplingParams

    say(stage="loading the model")
    llm = LLM(model, max_model_len=-1, max_num_seqs=4, kv_cache_memory_bytes=KV_CACHE_BYTES)
    say(stage="answering")
    asked = time.monotonic()
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (output,) = llm.generate([PROMPT], greedy, use_tqdm=False)
    completion = output.outputs[0]
    say(
        prompt=list(output.prompt_token_ids or ()),
        tokens=list(completion.token_ids),
        text=completion.text,
        answer_seconds=round(time.monotonic() - asked, 3),
    )
    say(stage="shutting down")
    del llm
    gc.collect()
    say(stage="leaving")


if __name__ == "__main__":
    main()
