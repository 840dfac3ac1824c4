# SPDX-License-Identifier: Apache-2.0
"""From --speculative-config to what drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_metal.batch.requests import Requests
from vllm_metal.spec_decode.adaptive import (
    AdaptiveDraftLengths,
    DraftLengthPolicy,
    FixedDraftLengths,
)
from vllm_metal.spec_decode.ngram import NgramProposer
from vllm_metal.spec_decode.proposer import Proposer
from vllm_metal.spec_decode.speculator import Speculator
from vllm_metal.spec_decode.suffix import SuffixOptions, SuffixProposer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Key of --additional-config; true: always num_speculative_tokens drafts, whatever they cost.
FIXED_LENGTH = "fixed_draft_length"


def make_speculator(
    config: VllmConfig, requests: Requests, network: Proposer | None
) -> Speculator | None:
    """What drafts for the requests; None without speculation.

    Args:
        config: vLLM's.
        requests: whose tokens drafts continue.
        network: the proposer of a method that has a network of its own.
    """
    speculation = config.speculative_config
    if speculation is None:
        return None
    num_drafts = speculation.num_speculative_tokens
    lengths: DraftLengthPolicy
    if _additional(config).get(FIXED_LENGTH):
        lengths = FixedDraftLengths(num_drafts)
    else:
        lengths = AdaptiveDraftLengths(num_drafts, config.scheduler_config.max_num_seqs)
    return Speculator(requests, network or _text_proposer(config), lengths, num_drafts)


def _text_proposer(config: VllmConfig) -> Proposer:
    speculation = config.speculative_config
    assert speculation is not None
    if speculation.method == "suffix":
        options = SuffixOptions(
            speculation.suffix_decoding_max_tree_depth,
            speculation.suffix_decoding_max_cached_requests,
            speculation.suffix_decoding_max_spec_factor,
            speculation.suffix_decoding_min_token_prob,
        )
        return SuffixProposer(speculation.num_speculative_tokens, options)
    shortest, longest = speculation.prompt_lookup_min, speculation.prompt_lookup_max
    assert shortest is not None and longest is not None  # vLLM fills in its defaults
    return NgramProposer(shortest, longest, speculation.num_speculative_tokens)


def _additional(config: VllmConfig) -> dict[str, object]:
    """--additional-config as it was given."""
    given = config.additional_config
    return given if isinstance(given, dict) else {}
