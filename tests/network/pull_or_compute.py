# SPDX-License-Identifier: Apache-2.0
"""Right choices of pulls over links of three rates: `python -m network.pull_or_compute`, as root.

Pages really come from another host's page server, by the client that engines use. Computing is a
rate with some noise: 2,500 tokens a second of a small model, 4 KiB of K/V a token.
Each request's pages are pulled to know how long that takes, and so is its computing drawn; what was
not chosen is measured by nobody.
"""

import logging
import random
import subprocess
import sys
import threading
import time
import types
from contextlib import closing

if __name__ == "__main__":
    # Importing vLLM takes seconds, and its logger is all that is used of it here.
    sys.modules["vllm"] = types.ModuleType("vllm")
    sys.modules["vllm.logger"] = types.ModuleType("vllm.logger")
    sys.modules["vllm.logger"].init_logger = logging.getLogger

from kv_transfer.peer.engines import SECRET, blank, fill, make_pages, make_terms, views
from network.hosts import hosts

from vllm_metal.kv_transfer.peer.address import Address
from vllm_metal.kv_transfer.peer.client import Peer
from vllm_metal.kv_transfer.peer.line import Line
from vllm_metal.kv_transfer.peer.outbox import Outbox
from vllm_metal.kv_transfer.peer.pull_choice import Circumstances, Offer, choose
from vllm_metal.kv_transfer.peer.server import PageServer

PAGES, PAGE, BLOCK, PREFILL = 64, 64 << 10, 16, 2500.0
COUNT = 120  # requests, the first of which measure
RATES = ("1gbit", "200mbit", "40mbit")


def serve(address: str) -> None:
    """Serves the pages, and prints the port."""
    outbox = Outbox(PAGES * PAGE)
    fill(outbox, make_pages(PAGES, PAGE))
    server = PageServer(Address(address, 0), SECRET, outbox, make_terms)
    print(server.port, flush=True)
    threading.Event().wait()


def right_choices(rate: str, count: int = COUNT) -> tuple[float, int]:
    """The share of requests for which the faster way was chosen, and how many were pulled."""
    rng, keys = random.Random(3), list(make_pages(PAGES, PAGE))
    compute, link, right, pulled = Line(256.0), Line(64e6), 0, 0
    with hosts(1, rate) as (host,):
        command = (sys.executable, "-m", "network.pull_or_compute", host.address)
        server = host.popen(*command, stdout=subprocess.PIPE, text=True)
        port = int(server.stdout.readline())
        terms = make_terms("decode-1")
        with closing(Peer(Address(host.address, port), SECRET, lambda: terms, str)) as peer:
            assert peer.ask(keys) == set(keys)
            for _ in range(count):
                number = round(2 ** rng.uniform(0, 6))
                pages = blank([b"\0" * PAGE] * number)
                chosen = choose(
                    {0: Offer(number * BLOCK, number * PAGE, link, 0.0)}, Circumstances(compute)
                )
                began = time.monotonic()
                assert peer.fetch(keys[:number], views(pages), lambda: True)
                pull = time.monotonic() - began
                computing = (0.005 + number * BLOCK / PREFILL) * rng.uniform(0.95, 1.05)
                if chosen is None:
                    compute.add(number * BLOCK, computing)
                else:
                    pulled += 1
                    link.add(number * PAGE, pull)
                    compute.add(1, 0.005)
                right += (pull + 0.005 < computing) == (chosen is not None)
    return right / count, pulled


def main() -> None:
    """Prints a line for each rate."""
    if len(sys.argv) > 1:
        serve(sys.argv[1])
    for rate in RATES:
        share, pulled = right_choices(rate)
        print(f"{rate}: {share:.3f} right, {pulled} of {COUNT} pulled", flush=True)


if __name__ == "__main__":
    main()
