# SPDX-License-Identifier: Apache-2.0
"""Options and help texts of all `vllm-metal` commands.

The options of `fit` and `doctor`, which have most, are in the commands' folders.
"""

import argparse
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from vllm_metal.cli import units
from vllm_metal.cli.doctor import options as doctor_options
from vllm_metal.cli.fit import options as fit_options
from vllm_metal.patches.vllm_patches import refused_arguments

#: Maps commands of other programs to what does the same here.
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
    """Prints errors in one line, without the usage."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._negative_number_matcher = _NEGATIVE  # makes -3GB a value, not an option

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = refused_arguments.of_command(self, found.command)
            command.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"vllm-metal: error: {refused_arguments.explain(self, message)}\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(version("vllm-metal"))
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """Creates the parser of command lines; it sets `command` to the command's name."""
    made = _Parser(prog="vllm-metal", description="Serve mlx-lm models with vLLM on Apple silicon.")
    made.add_argument("--version", action=_Version, nargs=0, help="print it and exit")
    commands = made.add_subparsers(metavar="COMMAND", dest="command")
    _add_convert(commands.add_parser("convert", help="turn a GGUF file into a model directory"))
    _add_model(commands.add_parser("model", help="print the path of the embedded default model"))
    fit_options.add(
        commands.add_parser("fit", help="estimate a model's memory and check whether it fits")
    )
    _add_launch(commands.add_parser("launch", help="start a coding agent on a local model"))
    doctor_options.add(
        commands.add_parser("doctor", help="check this machine, the engine and every kernel")
    )
    _add_chat(commands.add_parser("chat", help="chat with a model in the browser"))
    _add_cache(commands.add_parser("cache", help="list, remove or verify the prefix cache on disk"))
    _add_tenants(commands.add_parser("tenants", help="add, remove or list API keys of tenants"))
    _add_response_cache(commands.add_parser("response-cache", help="delete cached responses"))
    _add_response_cache(commands.add_parser("answers"))  # its former name, not listed in --help
    return made


def of_another_program(arguments: Sequence[str]) -> str | None:
    """Returns advice for a command of `vllm` or another program, such as `serve`, else None."""
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
    # Options of the former chat in the terminal, which `vllm chat` replaces; the command rejects
    # them with that advice. To be removed in the next release.
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
