# SPDX-License-Identifier: Apache-2.0
"""Compares this engine with mlx-lm and vLLM's CPU backend in one run.

All have the same weights, prompts, BLAS and number of threads, and take turns at the same requests:
with a shared prefix, without one, a single request, and a growing chat. Prints tables, writes JSON,
draws a plot: `python benchmarks/peers.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _peers_chat import chat, questions
from _peers_process import Peer, PeerError, cpu_seconds
from _peers_report import MLX_LM_SERVER, OURS_OFF, OURS_ON, plot, report
from _peers_turns import (
    MLX_LM,
    ONE,
    OURS,
    QUICK,
    SHARED,
    UNRELATED,
    VLLM_CPU,
    Sizes,
    agreement,
    compare,
    in_turn,
    measure,
)
from _server import Server, ServerError, free_port, serve
from _shared import note

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))  # sets up the environment

import _common  # noqa: E402

from vllm_metal.device import blas  # noqa: E402
from vllm_metal.settings import envs  # noqa: E402

PARTS = (SHARED, UNRELATED, ONE, "chat")
_SHORT_TEXT = "The capital of France is Paris. The capital of Italy is Rome. The capital of"
_MIB = 1 << 20
_START_S = 600.0
# Beyond this, idle peers noticeably slow down the one being measured.
_IDLE_SHARE = 0.05


def threads(number: int) -> dict[str, str]:
    """Returns variables that give every library `number` threads."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, str(number))


def of_vllm_cpu(options: dict[str, object]) -> dict[str, object]:
    """Returns options for vLLM's CPU backend: ours, and its best settings."""
    if shutil.which(os.environ.get("CXX", "g++")) is not None:
        return options
    note("no C++ compiler (g++, or what CXX names): vLLM's CPU backend runs uncompiled, slower")
    return options | {"enforce_eager": True}


def vllm_cpu_variables(args: argparse.Namespace) -> dict[str, str | None]:
    """Returns variables that select vLLM's CPU backend with as many cores as the others."""
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    return {
        "VLLM_METAL_DEVICE": "off",  # leaves vLLM to its own platforms
        # Its default reserves a core for its scheduler, which sleeps during a step.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        # `blas.load` sets these for MLX; vLLM's backend is fastest with its own defaults.
        "OMP_WAIT_POLICY": None,
        "GOMP_SPINCOUNT": None,
    }


@contextmanager
def engines(model: str, sizes: Sizes, args: argparse.Namespace, logs: Path) -> Iterator[list[Peer]]:
    """Starts all engines, each in its own process, and waits until they are ready."""
    folder = Path(__file__).parent
    of_vllm: dict[str, object] = {
        "model": model,
        "dtype": args.dtype,
        "max_model_len": sizes.longest() + 16,
        "max_num_seqs": sizes.streams,
        "kv_cache_memory_bytes": args.kv_cache_mib * _MIB,
    }
    of_mlx_lm = {"kind": "python", "model": model, "batch_options": {}}
    variables = threads(args.threads)
    with ExitStack() as stack:
        peers = []

        def start(name: str, script: str, options: dict, **more: str | None) -> None:
            log = logs / f"{name.replace(' ', '-')}.log"
            peer = Peer(name, folder / script, options, variables | more, log)
            stack.callback(peer.close)
            peers.append(peer)

        start(OURS, "_peers_vllm.py", of_vllm)
        start(MLX_LM, "_peers_mlx_lm.py", of_mlx_lm)
        if sys.platform == "linux" and not version("vllm").endswith("+metal"):
            start(VLLM_CPU, "_peers_vllm.py", of_vllm_cpu(of_vllm), **vllm_cpu_variables(args))
        else:
            note("vLLM's own CPU backend needs Linux and a vLLM with compiled parts: left out here")
        for peer in peers:
            peer.await_ready()
            note(f"{peer.name} is ready: {peer.about}")
        yield peers


def measure_engines(
    model: str, parts: Sequence[str], sizes: Sizes, args: argparse.Namespace, logs: Path
) -> dict[str, object]:
    """Measures the parts that need no server, and whether the engines agree."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    found: dict[str, object] = {}
    with engines(model, sizes, args, logs) as peers:
        answers = agreement(peers, tokenizer.encode(_SHORT_TEXT))
        found["agreement"] = {
            "equal": len({tuple(answer) for answer in answers.values()}) == 1,
            "answers": {name: tokenizer.decode(answer) for name, answer in answers.items()},
        }
        for part in parts:
            load = os.getloadavg()[0]
            runs, idle = measure(part, peers, sizes, args.repeats, len(tokenizer), note)
            found[part] = {
                "runs": {
                    peer: {state: [asdict(run) for run in of] for state, of in states.items()}
                    for peer, states in runs.items()
                },
                "ratios": compare(part, runs),
                "idle_cpu_share": idle,
                "load": (load, os.getloadavg()[0]),
            }
    return found


@contextmanager
def servers(model: str, sizes: Sizes, args: argparse.Namespace, logs: Path) -> Iterator[dict]:
    """Starts the servers; yields them by name."""
    options = [
        *("--dtype", args.dtype, "--max-model-len", str(sizes.longest_chat())),
        *("--max-num-seqs", "4", "--kv-cache-memory-bytes", str(args.kv_cache_mib * _MIB)),
        "--enable-prompt-tokens-details",
    ]
    os.environ.update(threads(args.threads))  # inherited by the servers
    with ExitStack() as stack:
        port = free_port()
        script = Path(__file__).with_name("_peers_mlx_lm.py")
        of_mlx_lm = {"kind": "server", "model": model, "port": port}
        log = logs / "mlx-lm-server.log"
        peer = Peer(MLX_LM_SERVER, script, of_mlx_lm, {}, log)
        stack.callback(peer.close)
        found = {}
        for name, flag in ((OURS_ON, "--enable"), (OURS_OFF, "--no-enable")):
            serving = serve(
                model,
                [*options, f"{flag}-prefix-caching"],
                logs / f"serve{flag}-caching.log",
                _START_S,
            )
            found[name] = stack.enter_context(serving)
            note(f"{name} serves")
        peer.await_ready()
        found[MLX_LM_SERVER] = Server(f"http://127.0.0.1:{port}", model, log)
        for server in found.values():
            server.warm_up()
        yield found


def measure_chats(model: str, sizes: Sizes, args: argparse.Namespace, logs: Path) -> dict:
    """Runs the same chats with every server in turn."""
    from transformers import AutoTokenizer

    end = AutoTokenizer.from_pretrained(model).eos_token_id
    # vLLM has an option for answers of fixed length; mlx-lm's server can be kept from ending early.
    longer = {
        OURS_ON: {"ignore_eos": True},
        OURS_OFF: {"ignore_eos": True},
        MLX_LM_SERVER: {"logit_bias": {str(end): -1e9}},
    }
    load = os.getloadavg()[0]
    chats: dict[str, list] = {}
    with servers(model, sizes, args, logs) as serving:
        for name, server in serving.items():  # warm-up of the chat's paths
            chat(server, questions(2, sizes.message, seed=1000), 4, longer[name])
        idle = idle_cpu_share()
        for repeat, name in in_turn(list(serving), args.repeats):
            says = questions(sizes.turns, sizes.message, seed=repeat)
            turns = chat(serving[name], says, sizes.answer, longer[name])
            chats.setdefault(name, []).append([asdict(turn) for turn in turns])
            note(f"chat {repeat + 1}/{args.repeats}, {name}: {turns[-1].ttft_ms:.0f} ms at its end")
    order = {name: chats[name] for name in longer}
    return {"chats": order, "idle_cpu_share": idle, "load": (load, os.getloadavg()[0])}


def idle_cpu_share(seconds: float = 2.0) -> float:
    """Returns the total CPU time of all idle servers, as a share of one core."""
    before, started = cpu_seconds(os.getpid()), time.perf_counter()
    time.sleep(seconds)
    return (cpu_seconds(os.getpid()) - before) / (time.perf_counter() - started)


def warnings_of(found: dict) -> list[str]:
    """Returns reasons to doubt the results."""
    lines = []
    said = found.get("agreement")
    if said is not None and not said["equal"]:
        lines.append("the peers' greedy answers DIFFER, so at least one of them is wrong:")
        lines += [f"  {name}: {text!r}" for name, text in said["answers"].items()]
    for part in PARTS:
        share = found.get(part, {}).get("idle_cpu_share", 0.0)
        if share > _IDLE_SHARE:
            lines.append(f"{part}: peers took {share:.0%} of a core while it was not their turn")
    return lines


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="directory or Hub name; default: the embedded model")
    parser.add_argument("--dtype", default="float32", help="dtype of vLLM; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="few short requests, once")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--repeats", type=int, help="default: 5, with --quick 1")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--threads",
        type=int,
        default=os.cpu_count(),
        help="threads of every peer; default: %(default)s",
    )
    parser.add_argument(
        "--kv-cache-mib",
        type=int,
        default=1024,  # 16 requests of 640 tokens of the embedded model in float32 take 450
        help="memory of each KV cache; it should hold all requests (default: %(default)s)",
    )
    args = parser.parse_args()
    if args.repeats is None:
        args.repeats = 1 if args.quick else 5
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    return args


def main() -> int:
    args = parse_args()
    # SIGTERM must also stop the peers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    device = _common.prepare(offline=args.model is None)
    if device is None:
        sys.exit("peers: VLLM_METAL_DEVICE=off turns vllm-metal off; unset it")
    if device == "cpu":
        blas.load()  # sets variables for BLAS threads that all processes with MLX inherit
    sizes = QUICK if args.quick else Sizes()
    try:
        model = args.model
        if model is None:
            from vllm_metal.engine.models.embedded import embedded_model_path

            model = str(embedded_model_path(dequantize=True))
        logs = args.out / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {}
        if parts := [part for part in args.parts if part != "chat"]:
            found |= measure_engines(model, parts, sizes, args, logs)
        if "chat" in args.parts:
            found["chat"] = measure_chats(model, sizes, args, logs)
    except (PeerError, ServerError, ImportError, OSError) as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("peers: interrupted; the peers are stopped", file=sys.stderr)
        return 130
    print()
    report(found)
    if args.quick:
        print("short requests: the goals are for those of a run without --quick")
    for line in warnings_of(found):
        print(line)
    keep(found, sizes, model, args)
    return 0


def keep(found: dict[str, Any], sizes: Sizes, model: str, args: argparse.Namespace) -> None:
    """Writes the results beside those of earlier runs, and plots all."""
    target = args.out / "peers.json"
    kept = json.loads(target.read_text()) if target.exists() else {}
    setting = {
        "model": Path(model).name,
        "dtype": args.dtype,
        "device": envs.requested_device(),
        "threads": args.threads,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "versions": {name: version(name) for name in ("vllm", "mlx", "mlx-lm")},
        "sizes": asdict(sizes),
    }
    measured = {
        name: {**found[name], "setting": setting} if name in PARTS else found[name]
        for name in found
    }
    kept |= measured
    target.write_text(json.dumps(kept, indent=2) + "\n")
    plot(kept, target.with_suffix(".png"))
    note(f"wrote {target} and {target.with_suffix('.png').name}")


if __name__ == "__main__":
    sys.exit(main())
