# SPDX-License-Identifier: Apache-2.0
"""What is checked before a model is loaded, and what the engine asks of every request."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_metal.serving import config
from vllm_metal.serving.config import MIDDLEWARE, SETTING
from vllm_metal.settings import salts, secret_file


def refusals(
    num_api_servers: int,
    disk_salt_key: Path | None,
    arguments: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, bool]:
    """Settings that do not go with `VLLM_METAL_SERVING_CONFIG`, and whether each was asked for.

    vLLM's configuration says nothing of a server's front end, so the command line is looked at, and
    the file that it may name (`--config`).

    Args:
        num_api_servers: --api-server-count.
        disk_salt_key: prefix_cache_salt_key, where it is set.
        arguments: of this process; None: its own.
        environment: likewise.

    Raises:
        ValueError: the file cannot be used, or is needed and not named.
    """
    arguments = sys.argv if arguments is None else arguments
    arguments = [*arguments, *_of_file(arguments)]
    environment = os.environ if environment is None else environment
    if any(MIDDLEWARE in argument for argument in arguments):
        config.required()
    settings = config.of_environment()
    if settings is None:
        return {}
    named = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    with_it = f"with {SETTING}"
    tenants = settings.tenants
    return {
        f"--api-server-count {num_api_servers} {with_it} (each would coalesce and "
        "count requests by itself: start several servers, with one Redis for cached "
        "responses)": (num_api_servers > 1),
        f"VLLM_USE_RUST_FRONTEND=1 {with_it} (it runs no middleware)": (
            environment.get("VLLM_USE_RUST_FRONTEND", "0").lower() in ("1", "true")
        ),
        f"--grpc {with_it} (it runs no middleware)": bool(named & {"--grpc", "--grpc-port"}),
        f"--api-key {with_it} (a request has one Authorization header: create keys "
        "with `vllm-metal tenants add`)": "--api-key" in named
        or bool(environment.get("VLLM_API_KEY")),
        (
            f"VLLM_MEDIA_CACHE {with_it} (a tenant could find out, by timing, what another "
            "one fetched)"
        ): (tenants is not None and bool(environment.get("VLLM_MEDIA_CACHE"))),
        f"prefix_cache_salt_key {disk_salt_key} with another secret in [tenants] (no "
        "tenant's blocks would be kept: use one file for both)": (
            tenants is not None
            and disk_salt_key is not None
            and secret_file.read(disk_salt_key, salts.SALT_KEY) != tenants.read_secret()
        ),
    }


def _of_file(arguments: Sequence[str]) -> list[str]:
    """Arguments in the file that `--config` names, as vLLM reads it."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found: list[str] = []
    for place, argument in enumerate(arguments):
        option, named, path = argument.partition("=")
        if option == "--config" and (named or place + 1 < len(arguments)):
            found += FlexibleArgumentParser().load_config_file(
                path if named else arguments[place + 1]
            )
    return found


def check_salt(salt: object) -> None:
    """Refuses a request that came past the middleware: by another route, or without it.

    Args:
        salt: the request's `cache_salt`, as the engine gets it.

    Raises:
        ValueError: there are tenants, and it is not one that the server made for one of them.
    """
    secret = secret_of_tenants()
    if secret is None:
        return
    text = salt if isinstance(salt, str) else None
    if salts.namespace(secret, text) in (None, salts.SHARED):
        raise ValueError(
            f"this engine serves tenants ({SETTING}), and the request did not come through "
            f"--middleware {MIDDLEWARE}"
        )


@functools.cache
def secret_of_tenants() -> bytes | None:
    """The secret that this process's settings name, read once; None: there are no tenants.

    Raises:
        ValueError: the settings, or the secret, cannot be used.
    """
    settings = config.of_environment()
    if settings is None or settings.tenants is None:
        return None
    return settings.tenants.read_secret()
