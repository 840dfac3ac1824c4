# SPDX-License-Identifier: Apache-2.0
"""Determines the ranks of a model, the layers of each, and how many share a machine."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from vllm_metal.cli.fit import ranks
from vllm_metal.cli.fit.machine import Machine
from vllm_metal.engine.models import staged_families
from vllm_metal.engine.models.stage import Stage

_LAYERS, _HEADS = "--pipeline-parallel-size", "--tensor-parallel-size"


@dataclass(frozen=True)
class Layout:
    """A model's ranks: `stages` pipeline stages of `heads` tensor-parallel ranks each."""

    stages: int = 1
    heads: int = 1
    machines: int = 1

    @staticmethod
    def of(args: Namespace) -> Layout:
        """Returns the requested layout, with one machine per rank unless --nnodes is given.

        Raises ValueError if the layout is impossible, or not supported with other options.
        """
        stages, heads = args.pipeline_parallel_size or 1, args.tensor_parallel_size or 1
        count = stages * heads
        machines = args.nnodes or count
        options = [name for name, size in ((_LAYERS, stages), (_HEADS, heads)) if size > 1]
        if count % machines:
            beside = " and ".join(options) or f"neither {_LAYERS} nor {_HEADS}"
            raise ValueError(
                f"--nnodes={machines} with {beside}: choose a number that divides {count} ranks"
            )
        if options:
            refused = {
                "--data-parallel-size-local": (args.data_parallel_size_local or 1) > 1,
                "--runner pooling": args.runner == "pooling",
                "--max-loras": args.max_loras is not None,
            }
            for option in (option for option, asked in refused.items() if asked):
                raise ValueError(
                    f"{option} is not supported with {' and '.join(options)}: leave one out"
                )
        return Layout(stages, heads, machines)

    @property
    def num_ranks(self) -> int:
        return self.stages * self.heads

    @property
    def per_machine(self) -> int:
        """Ranks per machine, which share its memory."""
        return self.num_ranks // self.machines

    def part(self, machine: Machine) -> Machine:
        """Returns one rank's share of its machine."""
        return machine.part(self.per_machine)

    def ranks_of(self, stage: int) -> range:
        """Returns the ranks of a stage, in vLLM's numbering."""
        return range(stage * self.heads, (stage + 1) * self.heads)

    def check(self, model_type: str, num_drafts: int) -> None:
        """Raises ValueError if the family does not support these stages, or drafts with them."""
        if self.stages == 1:
            return
        if (reason := staged_families.refusal(model_type)) is not None:
            raise ValueError(f"{_LAYERS} is not supported with {reason}")
        if num_drafts and staged_families.keeps_states(model_type):
            raise ValueError(
                f"--num-speculative-tokens is not supported with {_LAYERS} for models with "
                "recurrent layers"
            )

    def stage_of(self, stage: int) -> Callable[[int], Stage] | None:
        """Returns a function from the number of layers to a stage's layers; None for all layers."""
        if self.stages == 1:
            return None
        return partial(Stage.of, rank=stage, size=self.stages)

    @contextmanager
    def ring(self) -> Iterator[ranks.SimulatedGroup | None]:
        """Simulates tensor-parallel ranks in the block; yields their group, None for one rank."""
        if self.heads == 1:
            yield None
            return
        with ranks.alone(self.heads) as ring:
            yield ring

    @property
    def description(self) -> str:
        """The layout in words, to follow the machine's name; empty for one rank."""
        if self.num_ranks == 1:
            return ""
        if self.machines == 1:
            return f", which {self.num_ranks} ranks share"
        each = "" if self.per_machine == 1 else f", {self.per_machine} on each"
        return f": {self.num_ranks} ranks on {self.machines} such machines{each}"
