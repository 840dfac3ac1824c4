# SPDX-License-Identifier: Apache-2.0
"""What requests with images bring to a step: embeddings and positions of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from vllm_metal.engine.attention.forward_inputs import ForwardInputs
from vllm_metal.engine.batch.per_request_state import PerRequestState, RequestsRefused
from vllm_metal.engine.kv_cache.layer_state import Run
from vllm_metal.engine.vision.deepstack import DEEPSTACK
from vllm_metal.engine.vision.encoder import Encoder
from vllm_metal.engine.vision.images import Image, images_of
from vllm_metal.engine.vision.positions import AXES, Shifts, shifts
from vllm_metal.engine.vision.rotation import ROTATION, Rotation

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_metal.engine.batch.requests import RequestState
    from vllm_metal.engine.batch.rows import Rows


@dataclass(frozen=True)
class Axes:
    """How a model places rows of images by three positions."""

    rotation: Rotation
    merge_size: int  # patches of a row of an image, on each side


@dataclass(frozen=True)
class _Prompt:
    """A request that has images."""

    req_id: str
    images: list[Image]
    shifts: Shifts | None  # None: its positions are its places


@dataclass(frozen=True)
class _Span:
    """Rows of a request with images in a step."""

    prompt: _Prompt
    start: int  # its first row
    places_np: np.ndarray  # [n] int32, of its rows


class ImageColumn(PerRequestState):
    """Keeps the images of requests, and puts what a tower makes of them in their rows' place.

    A step whose rows are all of text gets nothing but the positions of those behind an image: it is
    the step that it would be without.
    """

    def __init__(
        self,
        encoder: Encoder,
        embed: Callable[[mx.array], mx.array],
        axes: Axes | None = None,
        scale: float = 1.0,
        whole: bool = False,
        windowed: bool = False,
        padding: int | None = None,
    ) -> None:
        """
        Args:
            encoder: makes embeddings of images, and keeps them.
            embed: makes [T, 1, H] embeddings of [T] int32 tokens, the text model's own.
            axes: of rows of images; None: they are placed as text is.
            scale: what the text model multiplies embeddings with, and those of images not.
            whole: whether the rows of an image see each other whatever their order.
            windowed: whether they do so in layers with a window alone, and within it.
            padding: the token that a row of an image is for layers that look at tokens themselves;
                None: no layer does.
        """
        self.encoder, self._embed = encoder, embed
        self._axes, self._embed_scale, self._whole = axes, scale, whole
        self._windowed, self._padding = windowed, padding
        self._prompts: dict[int, _Prompt] = {}  # by req_idx

    def step_begins(self, scheduler_output: SchedulerOutput) -> None:
        """Frees what the scheduler names."""
        self.encoder.free(scheduler_output.free_encoder_mm_hashes)

    def enter(self, state: RequestState) -> None:
        """Reads where a request's images lie.

        Raises:
            ValueError: they are not as the processor of the family places them.
        """
        self._prompts.pop(state.req_idx, None)  # of one that failed as it entered
        images = images_of(state.request.mm_features)
        if not images:
            return
        moved = None if self._axes is None else shifts(images, self._axes.merge_size)
        self._prompts[state.req_idx] = _Prompt(state.req_id, images, moved)

    def leave(self, req_idx: int) -> None:
        """See RequestColumn."""
        self._prompts.pop(req_idx, None)

    def inputs(self, rows: Rows, inputs: ForwardInputs) -> ForwardInputs:
        """See RequestColumn; computes the images that have rows, where that was not done before."""
        spans = self._spans(rows) if self._prompts else []
        return self._placed(spans, self._embedded(spans, inputs)) if spans else inputs

    def _spans(self, rows: Rows) -> list[_Span]:
        starts, found = rows.query_start_loc_np, []
        for index, req_idx in enumerate(rows.req_indices_np.tolist()):
            if (prompt := self._prompts.get(req_idx)) is not None:
                start, end = int(starts[index]), int(starts[index + 1])
                found.append(_Span(prompt, start, rows.positions_np[start:end]))
        return found

    def _placed(self, spans: list[_Span], inputs: ForwardInputs) -> ForwardInputs:
        """The inputs with the positions of rows in and behind images."""
        if self._axes is None:
            return inputs
        moved = np.zeros((AXES, inputs.positions.shape[1]), np.int32)
        for span in spans:
            if span.prompt.shifts is not None:
                end = span.start + len(span.places_np)
                moved[:, span.start : end] = span.prompt.shifts.at(span.places_np)
        if (moved == moved[0]).all():
            return replace(inputs, positions=inputs.positions + mx.array(moved[:1]))
        rotation = self._axes.rotation.of_rows(inputs.positions + mx.array(moved))
        return inputs.with_extras({ROTATION: rotation})

    def _embedded(self, spans: list[_Span], inputs: ForwardInputs) -> ForwardInputs:
        """The inputs with embeddings, and DeepStack's additions, where there are rows of images.

        Raises:
            RequestsRefused: images could not be computed.
        """
        where: list[np.ndarray] = []
        outputs: list[mx.array] = []
        runs: list[Run] = []
        failed: dict[str, Exception] = {}
        for span in spans:
            try:
                runs += self._runs(span)
                for rows_np, output in self._outputs(span):
                    where.append(rows_np)
                    outputs.append(output)
            except Exception as error:
                failed[span.prompt.req_id] = error
        if failed:
            raise RequestsRefused(failed)
        if not where:
            return inputs
        at = mx.array(np.concatenate(where))
        of_images = mx.concatenate(outputs)
        input_ids = mx.array(inputs.input_ids)
        input_ids[at] = self._padding or 0  # an image's token may lie beyond the embedding
        embeddings = self._embed(input_ids)
        scale = mx.array(self._embed_scale, embeddings.dtype)  # rounded as the text model's
        embeddings[at, 0] = (of_images[:, 0] / scale).astype(embeddings.dtype)
        inputs = replace(inputs, embeddings=embeddings, runs=tuple(runs))
        if self._padding is not None:
            inputs = replace(inputs, input_ids=input_ids)
        if (levels := of_images.shape[1] - 1) == 0:
            return inputs
        added = mx.zeros((len(embeddings), levels, embeddings.shape[-1]), of_images.dtype)
        added[at] = of_images[:, 1:]
        return inputs.with_extras({DEEPSTACK: added})

    def _outputs(self, span: _Span) -> Iterator[tuple[np.ndarray, mx.array]]:
        """Rows of the batch that are of images, and what the tower made for them."""
        first, last = int(span.places_np[0]), int(span.places_np[-1])
        for image in span.prompt.images:
            places = image.places_np
            begin, end = np.searchsorted(places, [first, last + 1])
            if begin < end:
                rows = places[begin:end] - first + span.start
                yield rows.astype(np.int32), self.encoder.output(image)[int(begin) : int(end)]

    def _runs(self, span: _Span) -> Iterator[Run]:
        """Rows of the batch that see each other.

        Raises:
            ValueError: some of them are to be computed in a later step.
        """
        first, last = int(span.places_np[0]), int(span.places_np[-1])
        for image in span.prompt.images if self._whole else ():
            for begin, end in image.runs_np.tolist():
                if end <= first or begin > last:
                    continue
                if end > last + 1:
                    raise ValueError(
                        f"an image of {end - begin} tokens with bidirectional attention must be "
                        "computed in one step: set --max-num-batched-tokens to more than that"
                    )
                shift = span.start - first
                yield Run(max(begin, first) + shift, end + shift, begin, self._windowed)
