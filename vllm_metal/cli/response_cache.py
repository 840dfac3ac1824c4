# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal response-cache`: deletes cached responses, even while servers use the cache."""

from __future__ import annotations

import argparse

from vllm_metal.cli import units
from vllm_metal.serving import config, tenants_file
from vllm_metal.serving.response_cache import stores


def purge(args: argparse.Namespace) -> int:
    """Deletes the responses of a tenant, or all of them."""
    if args.tenant is not None:
        tenants_file.check_name(args.tenant)
    settings = config.of_environment()
    if settings is None or settings.response_cache is None:
        raise ValueError(f"set {config.SETTING} to a settings file with a [response_cache] section")
    number = stores.purge(settings.response_cache, args.tenant)
    owner = f" of {args.tenant}" if args.tenant else ""
    print(f"removed {units.counted(number, 'response')}{owner}")
    return 0


ACTIONS = {"purge": purge}
