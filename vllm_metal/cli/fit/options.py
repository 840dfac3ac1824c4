# SPDX-License-Identifier: Apache-2.0
"""Options and help texts of `vllm-metal fit`."""

import argparse

from vllm_metal.cli import units


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Estimate how much memory a model needs and how many requests fit. Only "
        "config.json and the headers of the weight files are read. The exit status is "
        "0 if the requests fit and 1 if they do not."
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a folder, or a name on the Hugging Face hub; default: the largest that fits of a few "
        "well-known models, without asking the hub",
    )
    parser.add_argument(
        "--memory",
        type=units.memory,
        metavar="SIZE",
        help=(
            "memory of the Mac to serve on, such as 24GB; default: what is available on "
            "this machine now"
        ),
    )
    parser.add_argument(
        "--context",
        type=units.tokens,
        metavar="TOKENS",
        help="longest request (prompt and output) in tokens, such as 32k; default: the "
        "longest that fits, up to the model's maximum",
    )
    parser.add_argument(
        "--requests",
        type=units.count,
        metavar="N",
        help="requests that must fit at once, each of --context tokens; default: 1",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; sizes are bytes")
    served = parser.add_argument_group("options of `vllm serve`, with its defaults")
    _add_served(served)
    _add_ranks(served)
    _add_adapters(served)


def _add_served(served: argparse._ArgumentGroup) -> None:
    served.add_argument("--kv-cache-dtype", default="auto", metavar="auto|fp8|int8")
    served.add_argument("--dtype", choices=("auto", "bfloat16", "float16", "float32"))
    served.add_argument(
        "--runner",
        choices=("generate", "pooling"),
        help="pooling: the model embeds, scores or classifies; default: generate",
    )
    served.add_argument("--max-num-seqs", type=units.count, metavar="N", help="default: --requests")
    served.add_argument(
        "--num-speculative-tokens",
        type=units.count,
        metavar="N",
        help="num_speculative_tokens of --speculative-config",
    )
    served.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="block drafter of --speculative-config (method dflash or dspark) or Gemma 4's "
        "assistant: its weights and K/V are counted, those of other draft networks are not; "
        "default: the MTP layer or assistant of a model on this disk",
    )
    served.add_argument(
        "--draft-quantization",
        type=int,
        choices=(4, 8),
        help="draft_quantization of --additional-config",
    )
    served.add_argument(
        "--embedding-tables",
        choices=("auto", "memory", "disk"),
        help="embedding_tables of --additional-config; default: auto",
    )
    served.add_argument("--max-num-batched-tokens", type=units.tokens, metavar="N")
    served.add_argument(
        "--language-model-only",
        action="store_true",
        help="count only the text model of a multimodal model",
    )
    served.add_argument("--gpu-memory-utilization", type=units.share, metavar="SHARE")
    served.add_argument("--block-size", type=int, metavar="16|32")


def _add_ranks(served: argparse._ArgumentGroup) -> None:
    served.add_argument(
        "--data-parallel-size-local",
        type=units.count,
        metavar="N",
        help="data-parallel ranks on this machine, each with its own weights and an equal "
        "share of the memory; the estimate is for one of them",
    )
    served.add_argument(
        "--pipeline-parallel-size",
        type=units.count,
        metavar="N",
        help="pipeline-parallel ranks; layers are split evenly or by "
        "VLLM_PP_LAYER_PARTITION; the estimate is for each rank",
    )
    served.add_argument(
        "--tensor-parallel-size",
        type=units.count,
        metavar="N",
        help="tensor-parallel ranks; the estimate is for one of them",
    )
    served.add_argument(
        "--nnodes",
        type=units.count,
        metavar="N",
        help=(
            "number of machines that run these ranks, all with the same memory; default: "
            "one per rank"
        ),
    )


def _add_adapters(served: argparse._ArgumentGroup) -> None:
    served.add_argument(
        "--max-loras", type=units.count, metavar="N", help="with --enable-lora; default: none"
    )
    served.add_argument("--max-cpu-loras", type=units.count, metavar="N")
    served.add_argument("--max-lora-rank", type=units.count, metavar="N")
