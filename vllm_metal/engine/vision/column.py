# SPDX-License-Identifier: Apache-2.0
"""ImageColumn: embeddings and positions of image tokens in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from vllm_metal.engine.vision.positions import ShiftTable, shifts
from vllm_metal.engine.vision.rotation import Rotation, positioned

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_metal.engine.batch.requests import RequestState
    from vllm_metal.engine.batch.rows import Rows


@dataclass(frozen=True)
class Axes:
    """Rotary settings of a model with three positions per token (time, height, width)."""

    rotation: Rotation
    merge_size: int  # patches per token, along each side
    sections: Sequence[int]  # of rotary pairs, see rotation.put_in


@dataclass(frozen=True)
class StepImages:
    """Batch indices and embeddings of a forward's image tokens."""

    rows_np: np.ndarray  # [n] int32, their batch indices, ascending
    embeddings: mx.array  # [n, H], the tower's


@dataclass(frozen=True)
class _Prompt:
    req_id: str
    images: list[Image]

    @property
    def end(self) -> int:
        """Index of the first token after all images."""
        return self.images[-1].end


@dataclass(frozen=True)
class _Span:
    prompt: _Prompt
    start: int  # batch index of its first token
    indices_np: np.ndarray  # [n] int32, the tokens' indices in the request


class ImageColumn(PerRequestState):
    """Keeps the requests' images and replaces their tokens' embeddings by the tower's output.

    Steps with only text are unchanged, except for shifted positions after an image.
    """

    def __init__(
        self,
        encoder: Encoder,
        embed: Callable[[mx.array], mx.array],  # the text model's, [T] int32 to [T, 1, H]
        axes: Axes | None = None,  # None: image tokens are positioned as text
        scale: float = 1.0,  # the text model multiplies text embeddings by it, but not images'
        whole: bool = False,  # an image's tokens attend to each other bidirectionally
        windowed: bool = False,  # they do so only in sliding-window layers, within the window
        # Token id that stands for image tokens in layers that read token ids; None: no layer does.
        padding: int | None = None,
    ) -> None:
        self.encoder, self._embed = encoder, embed
        self.axes, self._embed_scale, self._whole = axes, scale, whole
        self._windowed, self._padding = windowed, padding
        self._prompts: dict[int, _Prompt] = {}  # by req_idx
        self._shifts = ShiftTable()
        # By request id, indices of images that have a place in the encoder since the newest step.
        self._scheduled: Mapping[str, Sequence[int]] = {}
        #: Images of the forward whose inputs were made last; None: it has no image tokens.
        self.newest: StepImages | None = None

    def step_begins(self, scheduler_output: SchedulerOutput) -> None:
        """Frees the outputs that the scheduler evicted from its encoder cache."""
        self.encoder.free(scheduler_output.free_encoder_mm_hashes)
        self._scheduled = scheduler_output.scheduled_encoder_inputs

    def enter(self, state: RequestState) -> None:
        """Locates a request's images. Raises ValueError if one does not match its grid."""
        self.leave(state.req_idx)  # of a request that failed in enter()
        images = images_of(state.request.mm_features)
        if not images:
            return
        if self.axes is not None:
            self._shifts.enter(state.req_idx, shifts(images, self.axes.merge_size))
        self._prompts[state.req_idx] = _Prompt(state.req_id, images)

    def leave(self, req_idx: int) -> None:
        self._prompts.pop(req_idx, None)
        self._shifts.leave(req_idx)

    def inputs(self, rows: Rows, inputs: ForwardInputs) -> ForwardInputs:
        """Adds the step's image embeddings; computes images that the encoder does not have yet."""
        self.newest = None
        if not self._prompts:
            return inputs
        if spans := self._spans(rows):
            inputs = self._with_embeddings(spans, inputs)
        if self.axes is None or (moved_np := self.shifts_of(rows)) is None:
            return inputs
        moved = positioned(inputs, moved_np, self.axes.rotation)
        return (
            moved if moved.extras is not inputs.extras else replace(moved, indices=rows.positions)
        )

    @property
    def any_requests(self) -> bool:
        """Whether any current request has images."""
        return bool(self._prompts)

    def shifts_of(self, rows: Rows) -> np.ndarray | None:
        """Differences between the tokens' positions and their indices, see ShiftTable."""
        return self._shifts.of_rows(rows)

    def embedding_at(self, req_idx: int, index: int, encode: bool) -> mx.array | None:
        """Looks up the tower's output for a token of a request.

        Args:
            req_idx: the request, with or without images.
            index: the token's index in the request.
            encode: computes the image if the encoder does not have it, since the scheduler has
                reserved room for it in the coming step.

        Returns:
            [1, H]; None for text, or if there is no output. An image that fails here fails again
            in the step that reads it.
        """
        prompt = self._prompts.get(req_idx)
        if prompt is None or index >= prompt.end:
            return None
        for image in prompt.images:
            found = np.flatnonzero(image.indices_np == index)
            if len(found):
                output = None
                with suppress(Exception):
                    output = (self.encoder.output if encode else self.encoder.known)(image)
                return None if output is None else output[int(found[0]) : int(found[0]) + 1, 0]
        return None

    def first_indices(self, req_indices_np: np.ndarray) -> np.ndarray:
        """Index of the first image token of [R] requests, [R] int32; the largest int32 if none."""
        found = np.full(len(req_indices_np), np.iinfo(np.int32).max, np.int32)
        for index, req_idx in enumerate(req_indices_np.tolist() if self._prompts else ()):
            if (prompt := self._prompts.get(req_idx)) is not None:
                found[index] = prompt.images[0].indices_np[0]
        return found

    def _spans(self, rows: Rows) -> list[_Span]:
        """Finds the requests that have scheduled tokens before the end of their last image."""
        starts, found = rows.query_start_loc_np, []
        for index, req_idx in enumerate(rows.req_indices_np.tolist()):
            if (prompt := self._prompts.get(req_idx)) is not None:
                start, end = int(starts[index]), int(starts[index + 1])
                if rows.positions_np[start] < prompt.end:
                    found.append(_Span(prompt, start, rows.positions_np[start:end]))
        return found

    def _with_embeddings(self, spans: list[_Span], inputs: ForwardInputs) -> ForwardInputs:
        """Adds embeddings and DeepStack's levels; fails only requests with unusable images."""
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
                # Draft heads also read the image that begins after the step's tokens.
                for index in self._scheduled.get(span.prompt.req_id, ()):
                    self.encoder.output(span.prompt.images[index])
            except Exception as error:
                failed[span.prompt.req_id] = error
        if failed:
            raise RequestsRefused(failed)
        if not where:
            return inputs
        rows_np, image_rows = np.concatenate(where), mx.concatenate(outputs)
        self.newest = StepImages(rows_np, image_rows[:, 0])
        at = mx.array(rows_np)
        input_ids = mx.array(inputs.input_ids)
        input_ids[at] = self._padding or 0  # an image's token id may exceed the vocabulary
        embeddings = self._embed(input_ids)
        # The text model multiplies by this factor, rounded to its dtype: divide by the same.
        scale = mx.array(self._embed_scale, embeddings.dtype)
        embeddings[at, 0] = (image_rows[:, 0] / scale).astype(embeddings.dtype)
        inputs = replace(inputs, embeddings=embeddings, runs=tuple(runs))
        if self._padding is not None:
            inputs = replace(inputs, input_ids=input_ids)
        if (levels := image_rows.shape[1] - 1) == 0:
            return inputs
        added = mx.zeros((len(embeddings), levels, embeddings.shape[-1]), image_rows.dtype)
        added[at] = image_rows[:, 1:]
        return inputs.with_extras({DEEPSTACK: added})

    def _outputs(self, span: _Span) -> Iterator[tuple[np.ndarray, mx.array]]:
        """Yields the batch indices of image tokens and the tower's output for them."""
        first, last = int(span.indices_np[0]), int(span.indices_np[-1])
        for image in span.prompt.images:
            indices = image.indices_np
            begin, end = np.searchsorted(indices, [first, last + 1])
            if begin < end:
                rows = indices[begin:end] - first + span.start
                yield rows.astype(np.int32), self.encoder.output(image)[int(begin) : int(end)]

    def _runs(self, span: _Span) -> Iterator[Run]:
        """Yields runs of tokens with bidirectional attention; each must end in this step."""
        first, last = int(span.indices_np[0]), int(span.indices_np[-1])
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
