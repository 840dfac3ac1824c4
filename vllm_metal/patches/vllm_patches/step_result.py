# SPDX-License-Identifier: Apache-2.0
"""StepResult: a step's results, what went wrong in it, and its figures; changes nothing in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import SchedulerStats

#: Figures by whose they are, and then by name, as every executor pickles and vLLM's server decodes
#: them: {"step": {"host_seconds": 0.1}}.
Figures = Mapping[str, Mapping[str, Any]]
_KEY = "vllm_metal"  # of the figures among a connector's statistics
NOT_A_NUMBER = "the model's logits are not numbers (NaN)"


@dataclass
class StepResult(ModelRunnerOutput):
    """A step's results, and what went wrong. The `scheduler` module has vLLM act on it."""

    failures: dict[str, str] = field(default_factory=dict)  # request id to the reason
    pool_lost: bool = False  # True: the KV pool was made anew, and holds no request's K/V
    figures: Figures = field(default_factory=dict)  # `scheduler` has vLLM send them to the server
    #: That follow what the step sampled; `drafts_with_results` has vLLM schedule them. None: vLLM
    #: asks the worker for them.
    drafts: DraftTokenIds | None = None


def has_results(result: ModelRunnerOutput) -> bool:
    """Whether there are tokens or embeddings: the host then had to wait for the step."""
    pooled = result.pooler_output or ()
    return any(result.sampled_token_ids) or any(each is not None for each in pooled)


def send_figures(stats: SchedulerStats, figures: Figures) -> None:
    """Puts figures where vLLM sends what a K/V connector reports: a dictionary of any."""
    stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), _KEY: figures}


def take_figures(stats: SchedulerStats) -> Figures:
    """Takes figures out of what vLLM's server got.

    Who takes them must come before vLLM's own loggers: these know a connector's figures only.
    """
    if not stats.kv_connector_stats or _KEY not in stats.kv_connector_stats:
        return {}
    others = dict(stats.kv_connector_stats)
    figures: Figures = others.pop(_KEY)
    stats.kv_connector_stats = others or None
    return figures
