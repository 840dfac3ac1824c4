# SPDX-License-Identifier: Apache-2.0
"""The `vllm-metal` command: runs a command line, and reports errors."""

import argparse
import gc
import importlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from vllm_metal.cli import early_checks, options
from vllm_metal.device import openmp
from vllm_metal.settings import envs


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `argv` (the process's own by default) and returns the exit status."""
    try:
        return _run(argv)
    except KeyboardInterrupt:  # also while the parser is built, which takes a tenth of a second
        print("vllm-metal: interrupted; nothing was left behind", file=sys.stderr)
        return 130


def _run(argv: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    launches = given[:1] == ["launch"] and "--" in given
    end = given.index("--") if launches else len(given)  # the rest belongs to the launched command
    if (advice := options.of_another_program(given)) is not None:
        print(f"vllm-metal: error: there is no command {given[0]}: {advice}", file=sys.stderr)
        return 1
    parser = options.parser()
    args = parser.parse_args(given[:end])
    if args.command is None:
        parser.print_help()
        return 0
    args.own_process, args.behind = argv is None, given[end + 1 :]
    for number in (signal.SIGTERM, signal.SIGHUP):  # SIGHUP: the terminal was closed
        signal.signal(number, _unwind)
    openmp.set_defaults()  # before a child loads torch
    try:
        envs.choose_device()
        status = _RUNS[args.command](args)
    except Exception as error:
        if (line := _error_line(error)) is None:
            raise
        print(f"vllm-metal: error: {line}", file=sys.stderr)
        return 1
    return status


def _error_line(error: Exception) -> str | None:
    # Returns None for a bug, which gets a traceback.
    if type(error) in (ValueError, ImportError):  # our own, possibly of several lines
        return str(error)
    from vllm_metal.patches.vllm_patches import start_failures

    line = start_failures.cause(error)
    return str(error) if line is None and isinstance(error, (ValueError, OSError)) else line


def _unwind(signum: int, frame: FrameType | None) -> None:
    # The default action would end the process and leave half-written folders and children behind.
    raise SystemExit(128 + signum)


def _convert(args: argparse.Namespace) -> int:
    # Imported here so that --help is fast.
    from vllm_metal.engine.weights.gguf import ConvertOptions, convert

    given = ConvertOptions(
        dtype=args.dtype,
        blocks=args.blocks,
        kquants=args.kquants,
        bits=args.bits,
        tokenizer=args.tokenizer,
        force=args.force,
    )
    out = convert(args.gguf, args.out, given)
    print(out)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    chats = any("chat_template" in path.read_text() for path in out.glob("tokenizer_config.json"))
    chats = chats or any(out.glob("chat_template*"))
    print(
        f"{size / 1e9:.2f} GB, {'with' if chats else 'without'} a chat template. To serve it: "
        f"vllm serve {shlex.quote(str(out))}",
        file=sys.stderr,
    )
    return 0


def _model(args: argparse.Namespace) -> int:
    from vllm_metal.engine.models.embedded import embedded_model_path

    print(embedded_model_path(dequantize=args.dequantize))
    return 0


def _fit(args: argparse.Namespace) -> int:
    os.environ.setdefault(
        "VLLM_LOGGING_LEVEL", "ERROR"
    )  # hides vLLM's start-up messages, which are not part of the answer
    if args.own_process:
        # This process prints its answer and ends. Garbage collection would take a third of its
        # time, and imports that no answer needs three times as much.
        gc.disable()
        from vllm_metal.patches.vllm_patches import partial_imports

        partial_imports.plan_only()
    if args.model is not None:
        early_checks.check_model(args.model, computes=True)
    from vllm_metal.cli.fit import command

    return command.run(args)


def _launch(args: argparse.Namespace) -> int:
    from vllm_metal.cli.launch import command

    return command.run(args)


def _doctor(args: argparse.Namespace) -> int:
    checks = {
        "--quick": args.quick,
        "--all": args.all,
        "--again": args.again,
        "--model": args.model,
        "--only": args.only,
        "--master-addr": args.master_addr,
    }
    if args.tune and (given := [name for name, value in checks.items() if value]):
        raise ValueError(
            f"doctor --tune only tunes kernels and runs no checks: leave out {', '.join(given)}"
        )
    if args.full and not args.tune:
        raise ValueError("doctor --full needs --tune; to check everything, use --all")
    if args.model is not None:
        early_checks.check_model(args.model, computes=True)
    from vllm_metal.cli.doctor import run, tune

    return tune.run(args) if args.tune else run.run(args)


def _chat(args: argparse.Namespace) -> int:
    from vllm_metal.cli.chat import command

    return command.run(args)


def _action_of(command: str) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        # Imports a module of this package only if its command runs.
        module = importlib.import_module(f"vllm_metal.cli.{command}")
        status: int = module.ACTIONS[args.action](args)
        return status

    return run


def _renamed(name: str) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        old = args.command
        print(f"vllm-metal: `{old}` was renamed to `{name}`; use the new name", file=sys.stderr)
        return _RUNS[name](args)

    return run


_RUNS: dict[str, Callable[[argparse.Namespace], int]] = {
    "convert": _convert,
    "model": _model,
    "fit": _fit,
    "launch": _launch,
    "doctor": _doctor,
    "chat": _chat,
    "cache": _action_of("cache"),
    "tenants": _action_of("tenants"),
    "response-cache": _action_of("response_cache"),
    "answers": _renamed("response-cache"),
}

if __name__ == "__main__":
    sys.exit(main())
