# SPDX-License-Identifier: Apache-2.0
"""Plays scenarios on a response cache's store."""

import asyncio
import time

#: Bytes of an empty SQLite store.
EMPTY = 5 * 4096


def key(number):
    return f"{number:064x}"


def play(make, scenario, max_bytes=10**6, ttl_s=1000.0, clock=time.time):
    async def run():
        store = make(max_bytes, ttl_s, clock)
        try:
            return await scenario(store)
        finally:
            await store.close()

    return asyncio.run(run())
