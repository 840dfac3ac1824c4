# SPDX-License-Identifier: Apache-2.0
"""The options of each `vllm-metal` command, with the words of its help."""

import argparse
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from vllm_metal.cli import units
from vllm_metal.patches.vllm_patches import refused_arguments

#: Commands of other programs, and what does the same here.
_ELSEWHERE = {
    "serve": "the server is vLLM's own command: vllm serve MODEL",
    "run": "vllm-metal chat MODEL talks to a model, and vllm serve MODEL serves it",
    "pull": "a model is downloaded when it is served; to download it before: hf download MODEL",
    "list": "models on this machine: hf cache ls",
    "ls": "models on this machine: hf cache ls",
    "ps": "a server lists its model at /v1/models: curl http://127.0.0.1:8000/v1/models",
    "rm": "to remove a model: hf cache rm model/OWNER/NAME",
    "show": "what a model needs, and whether it fits: vllm-metal fit MODEL",
    "stop": "stop a server with Ctrl-C in its terminal, or with SIGTERM",
}
_NEGATIVE = re.compile(r"-\d")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._negative_number_matcher = _NEGATIVE  # -3GB is a value, and no option

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = refused_arguments.of_command(self, found.command)
            command.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"vllm-metal: error: {refused_arguments.told(self, message)}\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(version("vllm-metal"))
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """The parser of a command line; `command` of what it finds is the command's name."""
    made = _Parser(prog="vllm-metal", description="Serve mlx-lm models with vLLM on Apple silicon.")
    made.add_argument("--version", action=_Version, nargs=0, help="print it and exit")
    commands = made.add_subparsers(metavar="COMMAND", dest="command")
    _add_convert(commands.add_parser("convert", help="turn a GGUF file into a model directory"))
    _add_model(commands.add_parser("model", help="print the path of the embedded default model"))
    _add_fit(commands.add_parser("fit", help="estimate a model's memory and check whether it fits"))
    _add_launch(commands.add_parser("launch", help="start a coding agent on a local model"))
    _add_doctor(
        commands.add_parser("doctor", help="check this machine, the engine and every kernel")
    )
    _add_chat(commands.add_parser("chat", help="chat with a model in the browser"))
    _add_cache(commands.add_parser("cache", help="list, remove or verify the prefix cache on disk"))
    _add_tenants(commands.add_parser("tenants", help="add, remove or list API keys of tenants"))
    _add_response_cache(commands.add_parser("response-cache", help="delete cached responses"))
    _add_response_cache(commands.add_parser("answers"))  # its name of before, not listed
    return made


def of_another_program(arguments: Sequence[str]) -> str | None:
    """What to type in place of a command that other programs have; None: it is none of those."""
    return _ELSEWHERE.get(arguments[0]) if arguments else None


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Turn a GGUF file of the llama, qwen2, qwen3 or gemma3 family into a directory that "
        "`vllm serve` and mlx-lm load. Blocks of 4, 5 and 8 bits stay exactly as they are."
    )
    parser.add_argument("gguf", type=Path, metavar="MODEL.gguf")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to create")
    parser.add_argument(
        "--kquants",
        choices=("dequantize", "requantize"),
        default="dequantize",
        help="Q2_K to Q6_K matrices: store them dense, or quantize them anew at --bits "
        "(smaller, with a second rounding); default: %(default)s",
    )
    parser.add_argument(
        "--bits",
        type=int,
        choices=(4, 8),
        default=4,
        help="width for --kquants requantize; default: %(default)s",
    )
    parser.add_argument(
        "--blocks",
        choices=("keep", "dequantize"),
        default="keep",
        help="Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 matrices: keep them quantized, or store them dense; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        help="type of dense weights and scales; default: the file's own, or for a quantized file "
        "float16 (gemma3: bfloat16, which rounds the scales of kept blocks)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="copy the tokenizer from this model directory instead of making it from the GGUF",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the directory of SmolLM2-135M-Instruct, converting it on the first call: "
        "vllm serve $(vllm-metal model)"
    )
    parser.add_argument(
        "--dequantize",
        action=argparse.BooleanOptionalAction,
        help="dense float32 weights, which the CPU device runs much faster than 4-bit ones; "
        "default: what suits this machine's device",
    )


def _add_fit(parser: argparse.ArgumentParser) -> None:
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
    _add_served(parser.add_argument_group("options of `vllm serve`, with its defaults"))


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
        help="num_speculative_tokens of --speculative-config; weights of a draft model are "
        "not counted",
    )
    served.add_argument("--max-num-batched-tokens", type=units.tokens, metavar="N")
    served.add_argument(
        "--language-model-only",
        action="store_true",
        help="count only the text model of a multimodal model",
    )
    served.add_argument("--gpu-memory-utilization", type=units.share, metavar="SHARE")
    served.add_argument(
        "--data-parallel-size-local",
        type=units.count,
        metavar="N",
        help="data-parallel ranks on this machine, each with its own weights and an equal "
        "share of the memory; the estimate is for one of them",
    )
    served.add_argument("--block-size", type=int, metavar="16|32")
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
    served.add_argument(
        "--max-loras", type=units.count, metavar="N", help="with --enable-lora; default: none"
    )
    served.add_argument("--max-cpu-loras", type=units.count, metavar="N")
    served.add_argument("--max-lora-rank", type=units.count, metavar="N")


def _add_launch(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start a coding agent on a local model. If no server runs on the port, one is "
        "started with the longest context that fits and the model's tool-call and "
        "reasoning parsers; it stops with the agent. The agent is configured with "
        "environment variables, arguments and temporary files: its own configuration "
        "does not change. The exit status is the agent's."
    )
    parser.add_argument("client", choices=("claude", "codex", "opencode", "pi"))
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a folder, or a name on the Hugging Face hub; default: what the running server "
        "serves, else the largest that fits of a few well-known models",
    )
    parser.add_argument(
        "--port",
        type=units.port,
        default=8000,
        help="port of the server on this machine; default: %(default)s",
    )
    parser.add_argument(
        "--context",
        type=units.tokens,
        metavar="TOKENS",
        help="longest request (prompt and output) in tokens if a server is started, such "
        "as 64k; default: the longest that fits, up to the model's maximum",
    )
    parser.add_argument(
        "--print", action="store_true", help="print the plan, without API keys, and exit"
    )
    _add_serve(parser)
    parser.epilog = (
        "Arguments after -- are passed to the agent: vllm-metal launch claude -- -p 'Hello'"
    )


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--serve",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="OPTION",
        help="must come last: pass the remaining arguments to the `vllm serve` that is "
        "started, such as --serve --kv-cache-dtype fp8",
    )


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check the whole installation, quick checks first: versions, macOS and "
        "memory; the platform that vLLM chooses; an engine and a server that each "
        "generate ten tokens and shut down; and the Metal kernels against their "
        "references, for a few shapes and the models that this machine has served, "
        "with times. This takes three to seven minutes. Results of kernel checks are "
        "kept for servers and for the next run, which resumes where this one stopped. "
        "Each problem is printed with advice. The report is written to a file, "
        "without the names of the user, the home folder and the machine. The exit "
        "status is 1 if a check fails. Without a Metal device, an interpreter runs "
        "the kernels for a few shapes. With --tune, no checks run: in some three "
        "minutes it finds the fastest kernel settings for this Mac and keeps them for "
        "servers."
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="PATH",
        default=Path("vllm-metal-doctor.json"),
        help="JSON file to write; default: %(default)s",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="use a small KV cache, and check the kernels for a few shapes",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="check the kernels for all dtypes, head sizes, block sizes and caches, too "
        "(up to half an hour the first time; an interrupted run resumes)",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="repeat checks that this machine has already passed",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="model to test: a folder, or a name on Hugging Face; default: the embedded "
        "model if it is installed, else a tiny one with random weights",
    )
    parser.add_argument(
        "--only",
        choices=("machine", "engine", "kernels"),
        help="check the machine and this part; default: all parts",
    )
    parser.add_argument(
        "--master-addr",
        metavar="ADDRESS",
        help="address of the first of several machines that share a model, as passed to "
        "`vllm serve`: check that this machine reaches it, and from which address; "
        "VLLM_HOST_IP and GLOO_SOCKET_IFNAME are checked if they are set",
    )
    parser.add_argument(
        "--master-port", type=units.port, metavar="PORT", default=29501, help="default: %(default)s"
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="tune the kernels on this Mac's GPU and keep the fastest settings for "
        "servers; plug the Mac in and do not use it meanwhile",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="with --tune: tune all kinds of layer that this machine has served, without a "
        "time limit",
    )


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Chat with a model in a page that this command serves on 127.0.0.1. The page "
        "shows the latency of each answer and plots of the engine, loads nothing from "
        "elsewhere, and keeps conversations in the browser. In a terminal, use vLLM's own "
        "`vllm chat`."
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="model to serve: a folder, or a name on Hugging Face; default: the embedded one",
    )
    parser.add_argument(
        "--url",
        help="use this running server instead of starting one; its API key is read from "
        "VLLM_API_KEY",
    )
    parser.add_argument(
        "--port",
        type=units.port,
        default=8090,
        help="port of the page; default: %(default)s. Browsers keep conversations per port",
    )
    parser.add_argument(
        "--open",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="open the page in the browser; default: yes",
    )
    parser.add_argument(
        "--max-model-len",
        type=units.tokens,
        help="context in tokens; default: the longest that fits",
    )
    parser.add_argument(
        "--kv-cache-gib",
        type=units.positive,
        default=1.0,
        metavar="GIB",
        help="size of the KV cache; default: %(default)s",
    )
    # Of the chat in the terminal, which vLLM's own replaced: to be removed with the next release.
    parser.add_argument("--terminal", action="store_true", help=argparse.SUPPRESS)
    for name in ("--system", "--max-tokens", "--temperature"):
        parser.add_argument(name, dest="terminal", help=argparse.SUPPRESS)
    _add_serve(parser)


def _add_cache(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List, remove or verify blocks of a prefix cache on disk, the folder of "
        "prefix_cache_dir. Safe while engines use the folder."
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    listing = actions.add_parser("ls", help="list cached blocks by model and namespace")
    listing.add_argument("--json", action="store_true", help="print JSON; sizes are bytes")
    removal = actions.add_parser("rm", help="remove blocks: all, or those that match every option")
    removal.add_argument(
        "--fingerprint",
        metavar="HEX",
        type=units.fingerprint,
        help="only this fingerprint, or those that begin with it",
    )
    removal.add_argument("--namespace", metavar="NAME", help="of this one")
    removal.add_argument(
        "--older-than",
        metavar="AGE",
        type=units.age,
        help="only blocks unused for this long, such as 30d",
    )
    removal.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    check = actions.add_parser(
        "verify", help="read and check every block; the exit status is 1 if corrupt blocks remain"
    )
    check.add_argument("--remove", action="store_true", help="remove corrupt blocks")
    for action in (listing, removal, check):
        action.add_argument("dir", type=Path, metavar="DIR")


def _add_tenants(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Add, remove or list API keys of tenants. The file keeps only digests, and "
        "servers apply changes within a second."
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    new = actions.add_parser("add", help="create a key and print it")
    new.add_argument("name", metavar="NAME", help="name of the tenant, who may have several keys")
    new.add_argument("--metrics", action="store_true", help="a key for /metrics and nothing else")
    removal = actions.add_parser(
        "rm",
        help=(
            "remove a key, or all keys of a tenant; removing the last one also deletes "
            "the tenant's cached data"
        ),
    )
    removal.add_argument("which", metavar="NAME|ID")
    removal.add_argument(
        "--prefix-cache",
        type=Path,
        metavar="DIR",
        help="also remove the tenant's blocks from this prefix cache on disk (prefix_cache_dir)",
    )
    listing = actions.add_parser("list", help="list ids, ages and names, but not the keys")
    for action in (new, removal, listing):
        action.add_argument(
            "--keys",
            type=Path,
            metavar="FILE",
            help="default: the one that VLLM_METAL_SERVING_CONFIG names",
        )


def _add_response_cache(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Delete cached responses from the store that VLLM_METAL_SERVING_CONFIG names. Running "
        "servers stop returning them at once."
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    purge = actions.add_parser("purge", help="delete all responses, or those of a tenant")
    purge.add_argument("--tenant", metavar="NAME", help="only this tenant's")
