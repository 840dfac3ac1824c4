# SPDX-License-Identifier: Apache-2.0
"""The service is one that launchd reads: a property list of keys from launchd.plist(5)."""

import plistlib

from deploy.queries import DEPLOY
from vllm.utils.argparse_utils import FlexibleArgumentParser

PLIST = DEPLOY / "launchd" / "org.vllm-metal.server.plist"
#: Of launchd.plist(5): the keys used, and the type that the page gives each.
KEYS = {
    "Label": str,
    "ProgramArguments": list,
    "WorkingDirectory": str,
    "EnvironmentVariables": dict,
    "RunAtLoad": bool,
    "KeepAlive": bool,
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "StandardOutPath": str,
    "StandardErrorPath": str,
}
SERVICE = plistlib.loads(PLIST.read_bytes())


def test_keys_and_their_types():
    assert {key: type(value) for key, value in SERVICE.items()} == KEYS
    assert SERVICE["Label"] == PLIST.stem
    assert SERVICE["ProcessType"] in ("Background", "Standard", "Adaptive", "Interactive")
    assert SERVICE["KeepAlive"]  # also after an end with status 0
    assert all(isinstance(value, str) for value in SERVICE["EnvironmentVariables"].values())


def test_the_command_is_one_of_vllms():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

    program, command, model, *options = SERVICE["ProgramArguments"]
    assert program.endswith("/.venv/bin/vllm") and (command, model) == ("serve", "MODEL")
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    assert (parsed.host, parsed.port) == ("127.0.0.1", 8000)


def test_paths_are_absolute():
    """launchd knows no home folder and no shell."""
    for path in (
        SERVICE["ProgramArguments"][0],
        SERVICE["WorkingDirectory"],
        SERVICE["StandardOutPath"],
        SERVICE["StandardErrorPath"],
    ):
        assert path.startswith("/Users/USER")


def test_a_stop_waits_for_the_engine():
    from vllm_metal.vllm_patches.shutdown import STOP_TIMEOUT

    options = SERVICE["ProgramArguments"]
    drained = int(options[options.index("--shutdown-timeout") + 1])
    assert SERVICE["ExitTimeOut"] > drained + STOP_TIMEOUT
