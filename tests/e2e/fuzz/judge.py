# SPDX-License-Identifier: Apache-2.0
"""Judges a run's tokens with a reference that has no batches, blocks or drafts.

Logits are mlx-lm's for the whole text of one request at a time. A greedy token must be their
argmax. Any other token must be what the sampler makes of these logits in a separate
batch: one request, one row, at the text's position. By induction over the tokens, that is the text
that the request would get alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from e2e.fuzz.play import Outcome, Served, keeps
from e2e.fuzz.traffic import Run
from vllm import SamplingParams
from vllm.outputs import CompletionOutput
from vllm.tokenizers import get_tokenizer

from vllm_metal.engine.sample import Sampler


class Logits(Protocol):
    """A source of reference logits."""

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """[len(tokens), V] float32."""


@dataclass(frozen=True)
class Problem:
    """A problem. kind: equal for similar problems. request: its index; None: the engine."""

    kind: str
    request: int | None
    message: str


@dataclass
class Judge:
    """Judges runs of one model.

    tie: logits this close count as equal, because batches sum them in another order.
    ties: number of such ties so far.
    """

    folder: str
    source: Logits
    tie: float
    ties: int = 0
    tokens: int = 0
    _tokenizer: Any = field(init=False)

    def __post_init__(self) -> None:
        self._tokenizer = get_tokenizer(self.folder)

    def problems(
        self,
        run: Run,
        outcome: Outcome,
        before: Sequence[Outcome] | None = None,
        killed: bool = False,
        kept: bool = False,
    ) -> Iterator[Problem]:
        """Yields the problems of a completed run.

        Args:
            run: the plan.
            outcome: its results.
            before: engines that used the same disk earlier; None: no disk.
            killed: whether an engine that played the same run was killed earlier.
            kept: whether everything that these have written is still there.
        """
        for served in outcome.served:
            found = [
                *self._samples(served, run.setting.max_len),
                *self._prompt_logprobs(served),
                *_cached(served, run, outcome, before, killed),
                *(_missed(served, run, before or ()) if kept else ()),
            ]
            yield from (Problem(kind, served.request.index, text) for kind, text in found)

    def _samples(self, served: Served, max_len: int) -> Iterator[tuple[str, str]]:
        for index, sample in sorted(served.samples.items()):
            params = _params(served, index, self._tokenizer)
            tokens = list(sample.token_ids)
            rows = self.source.logits([*served.prompt, *tokens[:-1]])[len(served.prompt) - 1 :]
            self.tokens += len(tokens)
            for place, wanted in self._wrong_tokens(served.prompt, tokens, rows, params):
                yield (
                    "token",
                    f"sample {index}, token {place} of {len(tokens)} after a prompt of "
                    f"{len(served.prompt)} is {tokens[place]}, and alone {wanted}",
                )
            if params.logprobs is not None:
                for place, row in enumerate(rows):
                    if wrong := _wrong_logprobs(sample.logprobs[place], row, self.tie):
                        yield "logprobs", f"sample {index}, token {place}: {wrong}"
            if not served.aborted and (
                wrong := _wrong_end(sample, params, max_len - len(served.prompt))
            ):
                yield "end", f"sample {index}: {wrong}"

    def _wrong_tokens(
        self, prompt: list[int], tokens: list[int], rows: np.ndarray, params: SamplingParams
    ) -> Iterator[tuple[int, int]]:
        alone = _Alone(rows.shape[1], prompt, params)
        for place, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            choice = alone.choose(row, tokens[:place])
            if choice == token:
                continue
            # If only rounding matters, a small change of either logit decides.
            for changed, by in ((token, self.tie), (choice, -self.tie)):
                nudged = row.copy()
                nudged[changed] += by
                if alone.choose(nudged, tokens[:place]) == token:
                    self.ties += 1
                    break
            else:
                yield place, choice
                return  # tokens after a wrong one are meaningless

    def _prompt_logprobs(self, served: Served) -> Iterator[tuple[str, str]]:
        if served.request.options.get("prompt_logprobs") is None or not served.samples:
            return
        found = served.prompt_logprobs or ()
        if len(found) != len(served.prompt):
            yield "logprobs", f"{len(found)} prompt logprobs of a prompt of {len(served.prompt)}"
            return
        rows = self.source.logits(served.prompt)
        for place, (entry, row) in enumerate(zip(found[1:], rows, strict=False), start=1):
            wrong = _wrong_logprobs(entry, row, self.tie)
            if wrong or served.prompt[place] not in entry:
                yield "logprobs", f"prompt token {place}: {wrong or 'its own is missing'}"


class _Alone:
    """Runs the sampler with a single request, one token at a time."""

    def __init__(self, vocab: int, prompt: list[int], params: SamplingParams) -> None:
        self._prompt, self._params = prompt, params
        self._vocab = vocab
        plain = SamplingParams(temperature=0)
        shaping = [
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
            "logit_bias",
            "allowed_token_ids",
            "bad_words",
            "min_tokens",
        ]
        self._greedy = params.temperature == 0 and all(
            getattr(params, name) == getattr(plain, name) for name in shaping
        )
        self._sampler = None if self._greedy else Sampler(vocab, 1)

    def choose(self, row: np.ndarray, output: list[int]) -> int:
        """Returns the token after `output`, from its logits [V]."""
        if self._sampler is None:
            return int(row.argmax())
        self._sampler.remove_request(0)
        self._sampler.add_request(0, self._params, self._prompt, list(output))
        req_idx, length = np.zeros(1, np.int32), np.array([len(output)], np.int32)
        return int(self._sampler.sample(mx.array(row)[None], req_idx, length).token_ids.item())


def _params(served: Served, index: int, tokenizer: Any) -> SamplingParams:
    """Returns one sample's parameters as vLLM's engine completes them."""
    params = copy(SamplingParams(**served.request.options))
    if params.seed is not None:
        params.seed += index
    params.update_from_generation_config({}, tokenizer.eos_token_id)
    params.update_from_tokenizer(tokenizer)
    return params


def _wrong_logprobs(entry: dict[int, Any], row: np.ndarray, tie: float) -> str | None:
    exact = row.astype(np.float64)
    exact -= exact.max()
    exact -= np.log(np.exp(exact).sum())
    for token, given in entry.items():
        if abs(given.logprob - exact[token]) > 2 * tie:
            return f"log p({token}) is {given.logprob}, not {exact[token]}"
        # Its rank counts higher logits, up to ties.
        lowest, highest = ((exact > exact[token] + by).sum() + 1 for by in (2 * tie, -2 * tie))
        if not lowest <= given.rank <= highest:
            return f"rank of {token} is {given.rank}, not {lowest} to {highest}"
    return None


def _wrong_end(sample: CompletionOutput, params: SamplingParams, room: int) -> str | None:
    """Returns why a sample should have ended elsewhere; `room`: tokens left in max_model_len."""
    tokens = list(sample.token_ids)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else params.all_stop_token_ids)
    first = next(
        (n for n, t in enumerate(tokens, 1) if t in stops and n >= params.min_tokens), None
    )
    longest = min(params.max_tokens, room)
    if sample.finish_reason == "length":
        right = len(tokens) == longest and first is None
    elif isinstance(sample.stop_reason, str):
        right = sample.stop_reason in params.stop and len(tokens) <= longest
    else:
        right = sample.finish_reason == "stop" and first == len(tokens)
    if right:
        return None
    return (
        f"{len(tokens)} tokens of at most {longest}, the first to stop at {first}, ended by "
        f"{sample.finish_reason} ({sample.stop_reason})"
    )


def _cached(
    served: Served, run: Run, outcome: Outcome, before: Sequence[Outcome] | None, killed: bool
) -> Iterator[tuple[str, str]]:
    """Yields prefix hits that no request with a shareable text explains."""
    if not served.cached:
        return
    prompt, size = served.prompt, run.setting.block_tokens
    # A disk may also have the last token's block; that token is still computed.
    all_but_last = before is not None and served.cached == len(prompt) - 1
    longest = len(prompt) - (before is None)
    if (served.cached % size and not all_but_last) or served.cached > longest:
        yield "cached", f"{served.cached} tokens of a prompt of {len(prompt)} were cached"
    if served.num_samples > 1 or killed:
        return  # samples share the prompt; or the disk's contents are unknown
    forgotten = max((step for step in outcome.resets if step <= served.added), default=0)
    kept = before is not None and (served.request.salt is None or keeps(served.request.salt))
    sources = [
        _common(prompt, text)
        for other in (*outcome.served, *(s for o in before or () if kept for s in o.served))
        if other is not served
        and other.request.salt == served.request.salt
        and (
            kept
            or (
                (other.ended is None or other.ended >= forgotten)
                and other.added <= (served.ended or other.added)
            )
        )
        for text in ([*other.prompt, *s.token_ids] for s in _samples_or_none(other))
    ]
    if served.cached > max(sources, default=0) // size * size:
        yield (
            "cached",
            f"{served.cached} tokens were cached; those with its salt that were not forgotten "
            f"share {max(sources, default=0)}",
        )


def _missed(served: Served, run: Run, before: Sequence[Outcome]) -> Iterator[tuple[str, str]]:
    """Yields blocks that were recomputed although an earlier engine had left them on disk."""
    salt, size = served.request.salt, run.setting.block_tokens
    if served.cached is None or not (salt is None or keeps(salt)):
        return
    if served.request.options.get("prompt_logprobs") is not None:
        return  # its whole prompt is computed
    texts = [
        [*other.prompt, *sample.token_ids][:-1]  # the last token was never computed
        for outcome in before
        for other in outcome.served
        if other.request.salt == salt and not other.aborted
        for sample in other.samples.values()
    ]
    there = max((_common(served.prompt, text) for text in texts), default=0) // size * size
    if served.cached < min(there, len(served.prompt) - 1):
        yield "missed", f"{served.cached} tokens were cached, and {there} are on disk"


def _samples_or_none(served: Served) -> list[Any]:
    return list(served.samples.values()) or [CompletionOutput(0, "", [], None, None)]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
