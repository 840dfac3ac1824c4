# SPDX-License-Identifier: Apache-2.0
"""Makes all ranks of a tensor group continue with the tokens sampled by the first one."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from vllm_metal.engine.sample import SamplerOutput


def of_first_rank(sampled: SamplerOutput, group: mx.distributed.Group) -> SamplerOutput:
    """Replaces this rank's samples by the first rank's, lazily; logprobs stay this rank's own."""
    # Every rank computes all logits with the same keys, but chips of different generations may
    # round differently and break a tie in two ways; ranks would then sum halves of different texts.
    # So one rank decides.
    accepted = sampled.num_accepted
    parts = [sampled.token_ids, sampled.last_token_ids, sampled.broken]
    parts = [part.astype(mx.int32) for part in (*parts, *([] if accepted is None else [accepted]))]
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part.size)
    # Zeros on other ranks, but dependent on their samples: all-reduces must run in the same order
    # on all ranks, and this one is the last of a step.
    own = mx.concatenate(parts) * int(group.rank() == 0)
    summed = mx.distributed.all_sum(own, group=group)
    token_ids, last, broken, *rest = mx.split(summed, ends[1:-1])
    return replace(
        sampled,
        token_ids=token_ids,
        last_token_ids=last,
        broken=broken.astype(mx.bool_),
        num_accepted=rest[0] if rest else None,
    )
