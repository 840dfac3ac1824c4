# SPDX-License-Identifier: Apache-2.0
"""launchd can read the services: property lists with keys from launchd.plist(5)."""

import json
import plistlib
from typing import Any

import pytest
from deploy.queries import DEPLOY
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_metal.kv_transfer.peer.config import PeerConfig

#: Keys in use, with their types in launchd.plist(5).
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
PLISTS = {
    path.stem.rpartition(".")[2]: path for path in sorted((DEPLOY / "launchd").glob("*.plist"))
}
SERVICES = {name: plistlib.loads(path.read_bytes()) for name, path in PLISTS.items()}
#: A user's values for the placeholders.
DESK = {"USER": "ann", "THIS_MAC": "10.10.0.2", "FIRST_MAC": "10.10.0.1", "MACS": "2", "RANK": "1"}
each_service = pytest.mark.parametrize("name", SERVICES)


def arguments(name: str) -> list[str]:
    """Returns the options of a service's command for a user."""
    program, command, model, *options = SERVICES[name]["ProgramArguments"]
    assert program.endswith("/.venv/bin/vllm") and (command, model) == ("serve", "MODEL")
    for word in sorted(DESK, key=len, reverse=True):
        options = [option.replace(word, DESK[word]) for option in options]
    return options


def parsed(name: str) -> Any:
    """Returns the options as parsed by vLLM."""
    from vllm.entrypoints.common.cli_args import make_arg_parser

    return make_arg_parser(FlexibleArgumentParser()).parse_args(arguments(name))


def test_there_are_services_for_one_mac_and_for_several():
    assert set(SERVICES) == {"server", "replica", "rank"}


@each_service
def test_keys_and_their_types(name):
    service = SERVICES[name]
    assert {key: type(value) for key, value in service.items()} == KEYS
    assert service["Label"] == PLISTS[name].stem
    assert service["ProcessType"] in ("Background", "Standard", "Adaptive", "Interactive")
    assert service["KeepAlive"]  # also after an end with status 0
    assert all(isinstance(value, str) for value in service["EnvironmentVariables"].values())
    assert service["EnvironmentVariables"]["VLLM_LOGGING_LEVEL"] == "INFO"  # its files are the log


def test_the_command_is_one_of_vllms():
    args = parsed("server")
    assert (args.host, args.port) == ("127.0.0.1", 8000)


def test_a_replica_is_asked_by_the_others_and_asks_them():
    args = parsed("replica")
    assert (args.host, args.port) == ("10.10.0.2", 8000)
    config = args.kv_transfer_config
    assert config.kv_role == "kv_both"
    extra = config.kv_connector_extra_config
    assert extra["listen"] == "10.10.0.2:9100"
    assert extra["secret"] == "/Users/ann/.kv-secret"  # of another machine it is demanded


def test_a_replica_has_the_keys_that_this_platform_knows():
    config = next(option for option in arguments("replica") if option.startswith("{"))
    extra = json.loads(config)["kv_connector_extra_config"]
    assert set(extra) <= set(PeerConfig.readers)
    for key, value in extra.items():
        PeerConfig.readers[key](value)


def test_a_rank_joins_the_first_macs():
    args = parsed("rank")
    assert args.headless
    assert (args.pipeline_parallel_size, args.nnodes, args.node_rank) == (2, 2, 1)
    assert args.master_addr == "10.10.0.1"
    assert SERVICES["rank"]["EnvironmentVariables"]["VLLM_HOST_IP"] == "THIS_MAC"


@each_service
def test_paths_are_absolute(name):
    """launchd expands no home folder and starts no shell."""
    service = SERVICES[name]
    for path in (
        service["ProgramArguments"][0],
        service["WorkingDirectory"],
        service["StandardOutPath"],
        service["StandardErrorPath"],
    ):
        assert path.startswith("/Users/USER")
    assert not any("~" in argument for argument in service["ProgramArguments"])


@each_service
def test_a_stop_waits_for_the_engine(name):
    from vllm_metal.patches.vllm_patches.shutdown import MAC_STOP_TIMEOUT

    options = arguments(name)
    drained = 0
    if "--shutdown-timeout" in options:
        drained = int(options[options.index("--shutdown-timeout") + 1])
    assert SERVICES[name]["ExitTimeOut"] > drained + MAC_STOP_TIMEOUT
