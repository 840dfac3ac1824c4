# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal tenants`: adds, removes and lists API keys; servers notice within a second."""

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
    """Creates and prints a new key; it cannot be printed again."""
    path = _key_file(args)
    path.parent.mkdir(parents=True, exist_ok=True)
    key, secret = tenants_file.add(path, args.name, "metrics" if args.metrics else "tenant")
    print(f"{key.id}  {key.tenant}: only its digest is kept in {path}", file=sys.stderr)
    print(secret)
    return 0


def rm(args: argparse.Namespace) -> int:
    """Removes a key, or all keys of a tenant; with the last one, deletes the tenant's data."""
    path = _key_file(args)
    removed = tenants_file.remove(path, args.which)
    for key in removed.keys:
        print(f"{key.id}  {key.tenant}: removed")
    return _remove_tenant_data(removed.ended, path, args.prefix_cache)


def list_keys(args: argparse.Namespace) -> int:
    """Prints a line per key."""
    for key in tenants_file.read(_key_file(args)):
        print(f"{key.id}  {key.made}  {key.purpose:7}  {key.tenant}")
    return 0


ACTIONS = {"add": add, "rm": rm, "list": list_keys}


def _key_file(args: argparse.Namespace) -> Path:
    if args.keys is not None:
        return Path(args.keys).expanduser()
    path = config.keys_file()
    if path is None:
        raise ValueError(
            f"pass the key file with --keys, or set {config.SETTING} to the settings file"
        )
    return path


def _remove_tenant_data(ended: Sequence[Key], keys: Path, prefix_cache: Path | None) -> int:
    # Without a key, no server finds a tenant's responses and K/V any more, not even for a new
    # tenant of the same name. So whatever cannot be deleted now is only reported, and does no harm.
    if not ended:
        return 0
    try:
        settings = config.of_environment()
    except ValueError as error:
        return _report(error)
    tenants = None if settings is None else settings.tenants
    if settings is None or tenants is None or tenants.keys.resolve() != keys.resolve():
        print(
            f"Cached data of the removed tenant was not deleted: set {config.SETTING} to the "
            f"settings file that uses {keys}"
        )
        return 0
    status = 0
    for key in ended:
        try:
            _remove_responses(settings, key)
        except OSError as error:
            status = _report(error)
        try:
            _remove_blocks(tenants, key, prefix_cache)
        except (ValueError, OSError) as error:
            status = _report(error)
    return status


def _remove_responses(settings: ServingConfig, key: Key) -> None:
    if settings.response_cache is not None:
        number = stores.purge(settings.response_cache, key.tenant)
        print(f"{key.tenant}: removed {units.counted(number, 'cached response')}")


def _remove_blocks(tenants: TenantsConfig, key: Key, prefix_cache: Path | None) -> None:
    secret = tenants.read_secret()
    namespace = salts.namespace(secret, salts.derive(secret, key.identity))
    if prefix_cache is None:
        print(
            f"{key.tenant}: if prefix_cache_dir keeps K/V on disk, remove the tenant's by "
            f"`vllm-metal cache rm --namespace {namespace} DIR`"
        )
        return
    maintenance.check_is_cache(prefix_cache)
    number, _ = maintenance.remove(prefix_cache, maintenance.Selection(namespace=namespace))
    print(f"{key.tenant}: removed {units.counted(number, 'block')} of K/V from {prefix_cache}")


def _report(error: Exception) -> int:
    print(f"vllm-metal: error: the keys are removed, but {error}", file=sys.stderr)
    return 1
