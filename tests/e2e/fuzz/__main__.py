# SPDX-License-Identifier: Apache-2.0
"""Runs `make fuzz`: seeds until a number of requests is served, or one given seed."""

import argparse
import faulthandler
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from cpu import use_cpu

# Before MLX or vLLM is imported: the CPU device, and an in-process engine.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
use_cpu()

from e2e.fuzz.campaign import Campaign  # noqa: E402
from e2e.fuzz.models import write_models  # noqa: E402
from e2e.fuzz.play import Disk, play  # noqa: E402
from e2e.fuzz.traffic import SIMPLER, Run, cut, draw  # noqa: E402

from vllm_metal.platform.metal_platform import MetalPlatform  # noqa: E402

_LONGEST_RUN_S = 600  # 100 times a normal run: on a hang, prints Python's stacks


def main() -> int:
    """Returns the exit status: 1 if a run failed."""
    options = _options()
    if options.loading:
        from e2e.fuzz import loading

        totals: Counter[str] = Counter()
        failure = loading.first_failure(options.first, options.loading, totals)
        print(f"{loading.summary(totals)}\n{failure or 'all is well'}")
        return int(failure is not None)
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), odd=True)
        campaign = Campaign(Path(folder), disk=options.disk, kills=options.disk)
        started = time.monotonic()

        def show(run: Run) -> None:
            faulthandler.dump_traceback_later(_LONGEST_RUN_S, exit=True)
            seconds = time.monotonic() - started
            print(f"{seconds:6.0f} s  seed {run.seed}  {_figures(campaign)}", flush=True)

        if options.seed is not None:
            sleeping = MetalPlatform().is_sleep_mode_available()
            run = cut(draw(options.seed, sleeping=sleeping), options.only, options.without)
            if options.disk_folder is not None:
                root, max_bytes, key = options.disk_folder
                play(run, Path(folder), Disk(Path(root), int(max_bytes), Path(key)))
                return 0
            show(run)
            problem = campaign.examine(run)
            print(problem.message if problem else "all is well")
            return problem is not None
        failed = 0
        while campaign.totals["requests"] < options.requests:
            failure = campaign.first_failure(_runs(campaign, options), show)
            if failure is None:
                break
            failed += 1
            print(f"FAILED: {failure}", flush=True)
            options.first = failure.part.seed + 1
            if failed == options.failures:
                break
        print(f"{failed} seeds failed;  {_figures(campaign)}")
        return int(failed > 0)


def _runs(campaign: Campaign, options: argparse.Namespace) -> Iterator[Run]:
    sleeping = MetalPlatform().is_sleep_mode_available()
    for seed in count(options.first):
        if campaign.totals["requests"] >= options.requests:
            return
        yield draw(seed, sleeping=sleeping)


def _figures(campaign: Campaign) -> str:
    return ", ".join(f"{number} {name}" for name, number in campaign.totals.items())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m e2e.fuzz", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", help="play this one alone")
    parser.add_argument(
        "--only", type=lambda text: [int(n) for n in text.split(",")], help="requests of the seed"
    )
    parser.add_argument(
        "--without",
        type=lambda text: text.split(","),
        default=[],
        help=f"leave out of the seed, any of {','.join(SIMPLER)}",
    )
    parser.add_argument(
        "--disk", action="store_true", help="with a prefix cache on disk; each seed is played twice"
    )
    parser.add_argument("--disk-folder", nargs=3, help=argparse.SUPPRESS)  # for a kill
    parser.add_argument("--requests", type=int, default=10_000, help="how many to serve in all")
    parser.add_argument(
        "--loading", type=int, default=0, help="in place of traffic, so many random folders"
    )
    parser.add_argument("--first", type=int, default=0, help="seed to begin with")
    parser.add_argument("--failures", type=int, default=3, help="failing seeds to stop after")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
