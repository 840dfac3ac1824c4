# SPDX-License-Identifier: Apache-2.0
"""What kept answers are sealed with, so that nobody who can write into a store makes answers."""

from __future__ import annotations

import secrets

from vllm.logger import init_logger

from vllm_metal.serving.config import ResponseCacheConfig
from vllm_metal.settings import secret_file

logger = init_logger(__name__)

FILE = "secret"  # in the folder of the answers


def secret_of(config: ResponseCacheConfig) -> bytes:
    """The secret where there are no tenants: that of the settings, or one made at the first start.

    Where none can be made, answers are kept under one that ends with this process.

    Raises:
        ValueError: as `secret_file.read`.
    """
    if config.secret is not None:
        return secret_file.read(config.secret, "[response_cache] secret")
    assert config.path is not None  # with Redis, the settings have to name one
    try:
        return secret_file.read_or_make(config.path / FILE, "[response_cache] path")
    except OSError as error:
        logger.warning(
            "%s cannot be made (%s): answers that are kept now are lost when this server ends.",
            config.path / FILE,
            error,
        )
        return secrets.token_bytes(32)
