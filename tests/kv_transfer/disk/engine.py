# SPDX-License-Identifier: Apache-2.0
"""A child process that writes and reads blocks: `engine.py ROOT LIMIT SEED WRITES DIES`.

DIES names a function of `os`: at its third call for a block, the process prints a line and hangs
until it is killed. "" disables this.
"""

import os
import random
import sys
import threading
import time
from pathlib import Path

from kv_transfer.disk import naive

from vllm_metal.kv_transfer.disk.limits import Limits
from vllm_metal.kv_transfer.disk.store import DiskStore


def hang_in(name: str) -> None:
    function = getattr(os, name)
    left = iter(range(2))

    def hanging(*args, **kwargs):
        if next(left, None) is None:
            print("hangs", flush=True)
            threading.Event().wait()
        return function(*args, **kwargs)

    setattr(os, name, hanging)


def main() -> None:
    root, limit, seed, writes, dies = sys.argv[1:]
    rng = random.Random(int(seed))
    cache = DiskStore(Path(root), Limits(int(limit), None))
    folder = cache.blocks(naive.FINGERPRINT, naive.FACTS, f"tenant-{int(seed) % 2}")
    if dies:
        hang_in(dies)
    for _ in range(int(writes)):
        number = rng.randrange(60)
        size = 1000 * rng.randrange(1, 4) if number % 7 == 0 else 3000
        folder.write(naive.key(number), naive.block(number, size), time.time(), number)
        back = naive.blank(naive.block(number, 3000))
        if folder.read(naive.key(number), back):
            assert back == naive.block(number, 3000)
    sys.stdin.read()  # until the parent has seen enough
    stats = cache.stats()
    cache.close()
    print(stats.num_written, stats.num_read, stats.num_evicted, sum(stats.num_refused.values()))


if __name__ == "__main__":
    main()
