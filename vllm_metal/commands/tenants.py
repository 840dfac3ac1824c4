# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal tenants`. A server takes a change up within a second."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vllm_metal.commands.tenants import removal
from vllm_metal.serving import config, tenants_file


def add(args: argparse.Namespace) -> int:
    """Prints a new key; nothing can print it again."""
    path = _file(args)
    path.parent.mkdir(parents=True, exist_ok=True)
    key, secret = tenants_file.add(path, args.name, "metrics" if args.metrics else "tenant")
    print(f"{key.id}  {key.tenant}: only its digest is kept in {path}", file=sys.stderr)
    print(secret)
    return 0


def rm(args: argparse.Namespace) -> int:
    """Removes a key, or all of a tenant's; with the last one, what was the tenant's own."""
    path = _file(args)
    removed = tenants_file.remove(path, args.which)
    for key in removed.keys:
        print(f"{key.id}  {key.tenant}: removed")
    return removal.remove(removed.ended, path, args.prefix_cache)


def list_keys(args: argparse.Namespace) -> int:
    """Prints a line for each key."""
    for key in tenants_file.read(_file(args)):
        print(f"{key.id}  {key.made}  {key.purpose:7}  {key.tenant}")
    return 0


ACTIONS = {"add": add, "rm": rm, "list": list_keys}


def _file(args: argparse.Namespace) -> Path:
    """The file of keys: of --keys, or the one that the server's settings name."""
    if args.keys is not None:
        return Path(args.keys).expanduser()
    path = config.keys_file()
    if path is None:
        raise ValueError(f"name the file of keys by --keys, or the settings by {config.SETTING}")
    return path
