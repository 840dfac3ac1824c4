# SPDX-License-Identifier: Apache-2.0
"""Checks settings before the model is loaded, and the salt of every request to the engine."""

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
    """Maps settings that conflict with `VLLM_METAL_SERVING_CONFIG` to whether each is set.

    `disk_salt_key`: prefix_cache_salt_key. `arguments` and `environment` default to those of this
    process. Raises ValueError if the settings file cannot be used, or the middleware has none.
    """
    # vLLM's configuration does not cover the front end, so the command line is searched, and the
    # file that it may name with --config.
    arguments = sys.argv if arguments is None else arguments
    arguments = [*arguments, *_config_file_arguments(arguments)]
    environment = os.environ if environment is None else environment
    if any(MIDDLEWARE in argument for argument in arguments):
        config.required()
    settings = config.of_environment()
    if settings is None:
        return {}
    named = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    with_config = f"with {SETTING}"
    tenants = settings.tenants
    return {
        f"--api-server-count {num_api_servers} {with_config} (each would coalesce and "
        "count requests by itself: start several servers, with one Redis for cached "
        "responses)": (num_api_servers > 1),
        f"VLLM_USE_RUST_FRONTEND=1 {with_config} (it runs no middleware)": (
            environment.get("VLLM_USE_RUST_FRONTEND", "0").lower() in ("1", "true")
        ),
        f"--grpc {with_config} (it runs no middleware)": bool(named & {"--grpc", "--grpc-port"}),
        f"--api-key {with_config} (a request has one Authorization header: create keys "
        "with `vllm-metal tenants add`)": "--api-key" in named
        or bool(environment.get("VLLM_API_KEY")),
        (
            f"VLLM_MEDIA_CACHE {with_config} (a tenant could find out, by timing, what another "
            "one fetched)"
        ): (tenants is not None and bool(environment.get("VLLM_MEDIA_CACHE"))),
        f"prefix_cache_salt_key {disk_salt_key} with another secret in [tenants] (no "
        "tenant's blocks would be kept: use one file for both)": (
            tenants is not None
            and disk_salt_key is not None
            and secret_file.read(disk_salt_key, salts.SALT_KEY) != tenants.read_secret()
        ),
    }


def _config_file_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments in the file of `--config`, read as vLLM does."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found: list[str] = []
    for index, argument in enumerate(arguments):
        option, named, path = argument.partition("=")
        if option == "--config" and (named or index + 1 < len(arguments)):
            found += FlexibleArgumentParser().load_config_file(
                path if named else arguments[index + 1]
            )
    return found


def check_salt(salt: object) -> None:
    """Rejects a request that bypassed the middleware.

    `salt`: the request's `cache_salt`, as the engine gets it. Raises ValueError if there are
    tenants, and this server did not derive the salt for one of them.
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
    """Reads the tenants' secret once; None without tenants.

    Raises ValueError if the settings or the secret cannot be used.
    """
    settings = config.of_environment()
    if settings is None or settings.tenants is None:
        return None
    return settings.tenants.read_secret()
