# SPDX-License-Identifier: Apache-2.0
"""StepResult: a step's results, failures and metrics; changes nothing in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import SchedulerStats

#: Metrics by owner and name, in types that every executor pickles and vLLM's server decodes:
#: {"step": {"host_seconds": 0.1}}.
Metrics = Mapping[str, Mapping[str, Any]]
_KEY = "vllm_metal"  # key of our metrics among a connector's statistics
NOT_A_NUMBER = "the model's logits are not numbers (NaN)"


@dataclass
class StepResult(ModelRunnerOutput):
    """A step's results and failures; the `scheduler` module makes vLLM act on them."""

    failures: dict[str, str] = field(default_factory=dict)  # request id to the reason
    pool_lost: bool = False  # the KV pool was rebuilt, and holds no request's K/V
    metrics: Metrics = field(default_factory=dict)  # `scheduler` makes vLLM send them to the server
    #: Drafts after the sampled tokens; `drafts_with_results` makes vLLM schedule them. None if vLLM
    #: requests them from the worker.
    drafts: DraftTokenIds | None = None


def has_results(result: ModelRunnerOutput) -> bool:
    """Returns whether there are tokens or embeddings, for which the host waited for the step."""
    pooled = result.pooler_output or ()
    return any(result.sampled_token_ids) or any(each is not None for each in pooled)


def send_metrics(stats: SchedulerStats, metrics: Metrics) -> None:
    """Puts metrics among the K/V connector's statistics, which vLLM sends as any dictionary."""
    stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), _KEY: metrics}


def take_metrics(stats: SchedulerStats) -> Metrics:
    """Removes our metrics from the statistics that vLLM's server got, and returns them.

    Call it before vLLM's own loggers, which only know a connector's statistics.
    """
    if not stats.kv_connector_stats or _KEY not in stats.kv_connector_stats:
        return {}
    others = dict(stats.kv_connector_stats)
    metrics: Metrics = others.pop(_KEY)
    stats.kv_connector_stats = others or None
    return metrics
