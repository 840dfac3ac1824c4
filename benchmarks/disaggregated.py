# SPDX-License-Identifier: Apache-2.0
"""Measures the benefit of disaggregated prefill and the cost of pulling pages.

Measures the rate of pages pulled over the loopback beside a plain socket's, and the time between
tokens of a server's streams while long prompts are prefilled by it or by another process. Prints
tables, writes JSON: `python benchmarks/disaggregated.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from _apart import Apart
from _peer_pulls import PullRates, measure_pulls
from _server import Server, free_port, serve
from _shared import note, table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))  # defines the default model

import _common  # noqa: E402

PARTS = ("pulls", "streams")
MAX_MODEL_LEN = 8192  # SmolLM2's longest
_START_S = 300.0
_OUTBOX = "2GB"  # a prompt of 4,000 tokens of SmolLM2 in float32 has 184 MB


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement; lengths in tokens."""

    pull_bytes: int = 256 << 20
    pull_repeats: int = 7
    prompt_len: int = 4000
    rounds: int = 3
    num_streams: int = 2
    alone_tokens: int = 60


QUICK = Sizes(pull_bytes=64 << 20, pull_repeats=3, prompt_len=1000, rounds=2, alone_tokens=30)


def connector(role: str, extra: dict[str, object]) -> str:
    """Returns a --kv-transfer-config."""
    return json.dumps(
        {
            "kv_connector": "MetalKVConnector",
            "kv_role": role,
            "kv_connector_extra_config": extra,
        }
    )


def streams(sizes: Sizes, folder: Path) -> dict[str, object]:
    """Measures the time between tokens of two servers' streams."""
    model = str(_common.default_model())
    address = f"127.0.0.1:{free_port()}"
    options = (
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", "512"),
        *("--kv-cache-memory-bytes", str(1 << 30), "--enable-prefix-caching"),
        "--kv-transfer-config",
    )
    of_prefill = connector("kv_producer", {"listen": address, "outbox_bytes": _OUTBOX})
    of_decode = connector("kv_consumer", {"peers": [address]})

    def server(name: str, config: str) -> AbstractContextManager[Server]:
        return serve(model, [*options, config], folder / name, _START_S)

    note("starting P and D")
    with server("prefill.log", of_prefill) as prefill, server("decode.log", of_decode) as decode:
        prefill.warm_up()
        decode.warm_up()
        rng = np.random.default_rng(0)
        apart = Apart(prefill, decode, sizes.num_streams)
        for number in range(sizes.rounds):
            prompts = rng.integers(4, 40000, (2, sizes.prompt_len)).tolist()
            apart.round(number, prompts, sizes.alone_tokens)
            note(f"round {number + 1} of {sizes.rounds}")
    return apart.metrics()


def report_pulls(rates: Sequence[PullRates]) -> None:
    """Prints the table of pulls."""
    rows = [
        (f"{each.page_bytes:,}", each.connections, each.pulled, each.plain, each.ratio)
        for each in rates
    ]
    headers = ("bytes a page", "connections", "pulled, GB/s", "plain socket, GB/s", "ratio")
    table(headers, rows)


def report_streams(found: dict) -> None:
    """Prints the table of streams, and its limits on this machine."""
    rows = [
        (name, *(float(value) for value in gaps.values()), float(sum(found["seconds"][name])))
        for name, gaps in found["ms"].items()
    ]
    headers = ("ms between tokens of D's streams", "number", "p50", "p99", "longest", "seconds")
    table(headers, rows)
    print(
        f"p99: one server {found['p99_one_over_apart']:.3g} times both apart, "
        f"{found['p99_one_over_pulling']:.3g} times while D pulls; "
        f"{found['pulled_tokens']:,.0f} of {found['prompt_tokens']:,} tokens were pulled"
    )
    print(
        f"P and D share this machine's {os.cpu_count()} CPUs. So the streams have less of them "
        "while P prefills, which a P on a machine of its own would not take from them: the rows "
        "'one server' and 'D pulls' say what D itself does. The network is the loopback; the time "
        "to first token is no gain here."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short prompts, few repeats")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: both")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    if _common.prepare(offline=True) is None:
        sys.exit("disaggregated: VLLM_METAL_DEVICE=off turns vllm-metal off; unset it")
    sizes = QUICK if args.quick else Sizes()
    target = args.out / "disaggregated.json"
    # Parts can be measured separately, each in a quiet hour.
    kept = json.loads(target.read_text()) if target.exists() else {}
    kept["machine"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    for part in args.parts:
        load = os.getloadavg()[0]
        note(f"{part}")
        if part == "pulls":
            rates = measure_pulls(sizes.pull_bytes, sizes.pull_repeats)
            report_pulls(rates)
            kept[part] = [asdict(each) for each in rates]
        else:
            with tempfile.TemporaryDirectory(prefix="disaggregated-") as name:
                kept[part] = streams(sizes, Path(name))
            report_streams(kept[part])
        kept["sizes"] = kept.get("sizes", {}) | {part: asdict(sizes)}
        kept["load"] = kept.get("load", {}) | {part: (load, os.getloadavg()[0])}
    args.out.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(kept, indent=2) + "\n")
    note(f"wrote {target}")


if __name__ == "__main__":
    main()
