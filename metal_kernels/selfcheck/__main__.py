# SPDX-License-Identifier: Apache-2.0
"""Checks kernels in a separate process, so that a hang or crash harms no other process.

    python -m metal_kernels.selfcheck < request.json

Reads {"cases": [...], "done": [...]}, where `done` lists the outcomes of earlier processes. Prints
a JSON object per line: before each check {"case": index, "running": kernel, "rows": rows of the
tile or null, "wide": whether in 512 threads}, so that a parent that kills this process knows which
check hung; after each check its outcome.
"""

import argparse
import json
import sys

import mlx.core as mx

from metal_kernels import kernel
from metal_kernels.selfcheck.case import Case, Outcome
from metal_kernels.selfcheck.checks import STEPS, check_kernel, next_check, usable


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m metal_kernels.selfcheck", description=__doc__)
    parser.add_argument("--compiler", help="module:function that runs kernels on the CPU")
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    args = parser.parse_args()
    if args.compiler:
        kernel.use(kernel.named(args.compiler))
        mx.set_default_device(mx.cpu)  # the references too, where there is a GPU
    request = json.load(sys.stdin)
    outcomes = [Outcome.from_json(fields) for fields in request["done"]]
    for index, fields in enumerate(request["cases"]):
        case = Case.from_json(fields)
        while (check := next_check(case, outcomes)) is not None:
            of_tile = {"rows": check.rows, "wide": check.wide}
            running = {"case": index, "running": check.kernel, **of_tile}
            print(json.dumps(running), flush=True)
            outcomes.append(check_kernel(case, check, args.steps, usable(case, outcomes)))
            print(json.dumps(outcomes[-1].to_json()), flush=True)


if __name__ == "__main__":
    main()
