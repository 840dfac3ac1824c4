# SPDX-License-Identifier: Apache-2.0
"""Serves one address in front of several `vllm serve`, scaled by load with Ray Serve.

Ray Serve starts a server on each Mac of a Ray cluster, or on this machine, and scales them by the
number of open requests. Arguments after "--" are passed to each server:

    python examples/cluster/serve.py MODEL --max-replicas 2 -- --max-model-len 4096
"""

import argparse
import os
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Seconds between the front end's reports of open requests to Ray; Ray's default is 10.
os.environ.setdefault("RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray reports each cluster to its makers
HEAD = "node:__internal_head__"  # Ray's resource for the machine that clients contact
OPEN_AT_FRONT = 10_000  # requests; the servers' own limits come first
LONGEST_ANSWER_S = 600.0  # grace period of a replica that is scaled down; equals `timeout_s`


def main() -> int:
    args, of_servers = arguments(sys.argv[1:])
    try:
        import ray
        from ray import serve
        from ray.serve.config import AutoscalingConfig, RequestRouterConfig
    except ImportError:
        print("This example needs Ray Serve: pip install 'ray[serve]'", file=sys.stderr)
        return 1
    from deployments import Elsewhere, Front, Replica

    ray.init(include_dashboard=False, runtime_env={"working_dir": str(HERE)})
    try:
        serve.start("HeadOnly", {"host": args.host, "port": args.port})
        replicas = serve.deployment(
            Replica,
            ray_actor_options={"num_cpus": 1},  # also runs on machines with --num-cpus=0
            max_replicas_per_node=args.replicas_per_node,
            # Excess requests wait at the front end for a replica that is starting.
            max_ongoing_requests=2 * args.target_ongoing_requests,
            autoscaling_config=AutoscalingConfig(
                min_replicas=args.min_replicas,
                max_replicas=args.max_replicas,
                target_ongoing_requests=args.target_ongoing_requests,
                upscale_delay_s=args.upscale_delay,
                downscale_delay_s=args.downscale_delay,
                look_back_period_s=args.look_back,
            ),
            request_router_config=RequestRouterConfig(request_router_class=Elsewhere),
            health_check_period_s=2.0,
            graceful_shutdown_timeout_s=LONGEST_ANSWER_S,
        )
        front = serve.deployment(
            Front,
            ray_actor_options={"num_cpus": 0, "resources": {HEAD: 0.001}},
            max_ongoing_requests=OPEN_AT_FRONT,
        )
        app = front.bind(replicas.bind([args.model, *of_servers], os.getcwd()))
        serve.run(app, name="vllm", route_prefix="/")
        print(f"Serving at http://{args.host}:{args.port}/v1; Ctrl-C ends it.", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        serve.shutdown()
        ray.shutdown()
    return 0


def arguments(given: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Splits the command line into our arguments and, after "--", those of `vllm serve`."""
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", help="model, as for vllm serve; every machine needs it under this name"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--max-replicas", type=int, default=2)
    parser.add_argument(
        "--replicas-per-node", type=int, default=1, help="replicas per machine; a Mac has one GPU"
    )
    parser.add_argument(
        "--target-ongoing-requests",
        type=int,
        default=16,
        metavar="N",
        help=("open requests per replica, including waiting ones, above which another one starts"),
    )
    seconds = {"type": float, "metavar": "SECONDS"}
    parser.add_argument(
        "--upscale-delay",
        default=10.0,
        help="seconds above that load before a replica starts",
        **seconds,
    )
    parser.add_argument(
        "--downscale-delay",
        default=300.0,
        help="seconds below that load before one stops",
        **seconds,
    )
    parser.add_argument(
        "--look-back", default=10.0, help="seconds over which open requests are averaged", **seconds
    )
    return parser.parse_args(given[:cut]), given[cut + 1 :]


if __name__ == "__main__":
    sys.exit(main())
