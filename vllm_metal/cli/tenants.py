# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal tenants`. A server takes a change up within a second.

With a tenant's last key goes what was its own: answers and K/V. From then on no server finds any of
it, not even for a tenant that is added under the same name. So what cannot be removed now is said,
and does no harm.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_metal.cli import units
from vllm_metal.kv_transfer.disk import maintenance
from vllm_metal.serving import config, tenants_file
from vllm_metal.serving.config import ServingConfig, TenantsConfig
from vllm_metal.serving.response_cache import stores
from vllm_metal.serving.tenants_file import Key
from vllm_metal.settings import salts


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
    return _remove_what_was_theirs(removed.ended, path, args.prefix_cache)


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
        raise ValueError(
            f"pass the key file with --keys, or set {config.SETTING} to the settings file"
        )
    return path


def _remove_what_was_theirs(ended: Sequence[Key], keys: Path, prefix_cache: Path | None) -> int:
    """Removes answers and K/V of tenants that have no key any more; returns the exit status.

    Args:
        ended: a key of each.
        keys: the file that it stood in.
        prefix_cache: folder of K/V on disk; None: how to remove them is printed.
    """
    if not ended:
        return 0
    try:
        settings = config.of_environment()
    except ValueError as error:
        return _complain(error)
    tenants = None if settings is None else settings.tenants
    if settings is None or tenants is None or tenants.keys.resolve() != keys.resolve():
        print(
            f"Cached data of the removed tenant was not deleted: {config.SETTING} is not "
            f"the settings file that uses {keys}"
        )
        return 0
    status = 0
    for key in ended:
        try:
            _remove_answers(settings, key)
        except OSError as error:
            status = _complain(error)
        try:
            _remove_blocks(tenants, key, prefix_cache)
        except (ValueError, OSError) as error:
            status = _complain(error)
    return status


def _remove_answers(settings: ServingConfig, key: Key) -> None:
    if settings.response_cache is not None:
        number = stores.purge(settings.response_cache, key.tenant)
        print(f"{key.tenant}: removed {units.counted(number, 'cached response')}")


def _remove_blocks(tenants: TenantsConfig, key: Key, prefix_cache: Path | None) -> None:
    secret = tenants.read_secret()
    namespace = salts.namespace(secret, salts.derive(secret, key.identity))
    if prefix_cache is None:
        print(
            f"{key.tenant}: where prefix_cache_dir keeps K/V on disk, remove its own by "
            f"`vllm-metal cache rm --namespace {namespace} DIR`"
        )
        return
    maintenance.check_is_cache(prefix_cache)
    number, _ = maintenance.remove(prefix_cache, maintenance.Selection(namespace=namespace))
    print(f"{key.tenant}: removed {units.counted(number, 'block')} of K/V from {prefix_cache}")


def _complain(error: Exception) -> int:
    print(f"vllm-metal: error: the keys are removed, but {error}", file=sys.stderr)
    return 1
