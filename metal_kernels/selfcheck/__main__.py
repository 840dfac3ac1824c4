# SPDX-License-Identifier: Apache-2.0
"""Checks cases in a process of their own, which may hang or die without harm to another.

    python -m metal_kernels.selfcheck < cases.json

Reads a list of cases. Prints a JSON object a line: {"case": index, "running": kernel} before each
check, so that whoever has to end this process knows why, and its outcome after it.
"""

import argparse
import json
import sys

import mlx.core as mx

from metal_kernels import kernel
from metal_kernels.selfcheck.case import Case
from metal_kernels.selfcheck.checks import STEPS, check_kernel, in_use


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m metal_kernels.selfcheck", description=__doc__)
    parser.add_argument("--interpret", action="store_true", help="run kernels on the CPU")
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    args = parser.parse_args()
    if args.interpret:
        from metal_kernels import interpreter

        kernel.use(interpreter.metal_kernel)
        mx.set_default_device(mx.cpu)  # the references too, where there is a GPU
    for index, fields in enumerate(json.load(sys.stdin)):
        case = Case.from_json(fields)
        for name in in_use(case):
            print(json.dumps({"case": index, "running": name}), flush=True)
            outcome = check_kernel(case, name, args.steps)
            print(json.dumps(outcome.to_json()), flush=True)
            if name == "kv_write" and not outcome.ok:
                break


if __name__ == "__main__":
    main()
