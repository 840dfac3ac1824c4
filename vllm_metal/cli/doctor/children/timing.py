# SPDX-License-Identifier: Apache-2.0
"""Times each kernel by itself, so that the failure of one only affects its own result.

python -m vllm_metal.cli.doctor.children.timing [--start INDEX]
"""

import argparse

import mlx.core as mx

from metal_kernels import kernel
from metal_kernels.paged_attention import AttentionShape
from metal_kernels.selfcheck import Case, Work, copy_bandwidth, works
from vllm_metal.device.child import send_message
from vllm_metal.settings.extras import INTERPRETER

#: The attention of Llama 3 8B, over a cache of its own dtype and over a quantized one.
_SHAPE = AttentionShape(32, 8, 128, 128)
_CASES = tuple(Case(_SHAPE, mx.bfloat16, cache, 16) for cache in (mx.bfloat16, mx.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=int, default=0, help="the first to time")
    parser.add_argument("--contexts", type=int, nargs=2, default=(1024, 8192))
    parser.add_argument("--interpret", action="store_true", help="run kernels on the CPU")
    args = parser.parse_args()
    if args.interpret:
        kernel.use(kernel.named(INTERPRETER))
    short, long = args.contexts
    wanted = [work for case in _CASES for work in works(case, (short, long))]
    if args.start == 0:
        send_message(bandwidth=copy_bandwidth())
    for index, work in enumerate(wanted):
        if index >= args.start:
            send_message(index=index, timing=work.name)
            send_message(index=index, **_timed(work))


def _timed(work: Work) -> dict[str, object]:
    try:
        return {"name": work.name, "seconds": work.seconds(), "moved": work.moved}
    except Exception as error:  # whatever a compiler or a driver raises
        return {"name": work.name, "failed": str(error)}


if __name__ == "__main__":
    main()
