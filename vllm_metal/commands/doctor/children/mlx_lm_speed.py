# SPDX-License-Identifier: Apache-2.0
"""Times prefill and decode of mlx-lm by itself, for one request.

python -m vllm_metal.commands.doctor.children.mlx_lm_speed MODEL DTYPE NUM_PROMPT NUM_ANSWER
"""

import argparse

from vllm_metal.commands.doctor.messages import say
from vllm_metal.device import blas
from vllm_metal.settings import envs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("dtype", help="of the engine that it is compared with")
    parser.add_argument("num_prompt", type=int)
    parser.add_argument("num_answer", type=int)
    args = parser.parse_args()
    say(stage="starting")
    kind = envs.requested_device() or "metal"
    if kind == "cpu":
        blas.load()
    import mlx.core as mx
    from mlx_lm import load, stream_generate

    from vllm_metal.device import mlx_device

    mlx_device.select(kind)
    say(stage="loading the model")
    model, tokenizer = load(args.model)[:2]
    model.set_dtype(getattr(mx, args.dtype))
    tokenizer.eos_token_ids = []  # answers have the length that was asked for
    prompt = [5 + index * 7 % 50 for index in range(args.num_prompt)]
    say(stage="answering")
    for _ in range(2):  # the first compiles
        *_, last = stream_generate(model, tokenizer, prompt, args.num_answer)
    say(
        prefill=last.prompt_tps,
        # mlx-lm counts from the first token, and that one too.
        decode=last.generation_tps * (last.generation_tokens - 1) / last.generation_tokens,
        num_answer=last.generation_tokens,
    )


if __name__ == "__main__":
    main()
