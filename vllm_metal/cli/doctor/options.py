# SPDX-License-Identifier: Apache-2.0
"""Options and help texts of `vllm-metal doctor`."""

import argparse
from pathlib import Path

from vllm_metal.cli import units

_DESCRIPTION = (
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


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    _add_checks(parser)
    _add_network(parser)
    _add_tuner(parser)


def _add_checks(parser: argparse.ArgumentParser) -> None:
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


def _add_network(parser: argparse.ArgumentParser) -> None:
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


def _add_tuner(parser: argparse.ArgumentParser) -> None:
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
