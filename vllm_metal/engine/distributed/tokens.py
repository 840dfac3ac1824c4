# SPDX-License-Identifier: Apache-2.0
"""Has all ranks of a tensor group go on with the tokens that the first one sampled."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from vllm_metal.engine.sample import SamplerOutput


def of_first_rank(sampled: SamplerOutput, group: mx.distributed.Group) -> SamplerOutput:
    """What the first rank sampled, on every rank; lazy.

    Every rank computes all logits, with the same keys. On chips of different generations they may
    differ by a rounding, and a tie would be settled in two ways: from there on ranks would sum
    halves of different texts. So one rank decides.

    Args:
        sampled: of this rank, a step's. Its logprobs stay this rank's own.
        group: the ring.
    """
    accepted = sampled.num_accepted
    parts = [sampled.token_ids, sampled.last_token_ids, sampled.broken]
    parts = [part.astype(mx.int32) for part in (*parts, *([] if accepted is None else [accepted]))]
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part.size)
    # Zeros that depend on what this rank sampled: its sums must come in the order of the others',
    # and this one is the last of a step.
    own = mx.concatenate(parts) * int(group.rank() == 0)
    told = mx.distributed.all_sum(own, group=group)
    token_ids, last, broken, *rest = mx.split(told, ends[1:-1])
    return replace(
        sampled,
        token_ids=token_ids,
        last_token_ids=last,
        broken=broken.astype(mx.bool_),
        num_accepted=rest[0] if rest else None,
    )
