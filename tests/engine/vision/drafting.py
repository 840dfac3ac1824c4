# SPDX-License-Identifier: Apache-2.0
"""Engines that draft beside images, with records and checks of their drafts."""

from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest
from e2e.harness import engine, run_out
from engine.spec_decode.image_drafts import Target
from PIL import Image
from vllm import SamplingParams

from vllm_metal.engine.spec_decode.block import BlockProposer
from vllm_metal.engine.spec_decode.draft_model import DraftModelProposer
from vllm_metal.engine.spec_decode.newest_state import StateProposer
from vllm_metal.engine.spec_decode.paged_head import HeadPasses, HeadProposer
from vllm_metal.engine.vision.column import ImageColumn

NUM_TOKENS = 20
CLOSE = 1e-4  # of the largest number of hidden states, in float32
SAMPLE = 5  # of so many drafted texts, one is judged
FEW = [256, 257, 258, 259, 260, 261, 262, 263]  # all but these tokens the model hardly ever says
CHUNK = 34  # tokens of a step: chunks end within images

rng = np.random.default_rng(0)
IMAGES = WIDE, TALL = tuple(
    Image.fromarray(rng.integers(0, 255, (*shape, 3), dtype=np.uint8))
    for shape in ((96, 192), (160, 64))
)
WORDS = "tell tell tell "


def asked(family):
    """Returns prompts with images: one that begins with an image, one with two, and a text."""
    image = family.image
    return [
        (f"{image} {WORDS * 4}", [WIDE]),
        (f"{WORDS * 2}{image} and {image} {WORDS * 2}", [TALL, WIDE]),
        (f"and {WORDS * 3}", []),
    ]


@dataclass
class Noted:
    """Records of engines' drafts."""

    drafts: list = field(default_factory=list)  # of (text, drafts) of a request in a step
    rows: list = field(default_factory=list)  # of (text, first row, [n, H] that a head makes)
    num_ahead: int = 0  # embeddings of images' tokens that the next step computes

    def check(self, judge):
        """Returns the largest gap of drafts to the best logit and the rows' largest error."""
        gaps, errors = [], []
        for text, drafts in self.drafts[::SAMPLE]:
            logits = judge(request_of(judge, text), text, drafts)
            gaps += [row.max() - row[token] for row, token in zip(logits, drafts, strict=True)]
        known = {}
        for text, first, out in self.rows:
            longest = max((t for t, *_ in self.rows if t[: len(text)] == text), key=len)
            if (key := tuple(longest)) not in known:
                known[key] = judge.rows(request_of(judge, longest), longest)
            expected = known[key][first : first + len(out)]
            errors.append(np.abs(np.array(out) - expected).max() / np.abs(expected).max())
        return max(gaps), max(errors, default=0.0)


def request_of(judge, text):
    """Returns the judge's request that a text belongs to."""
    (found,) = (n for n, of in enumerate(judge.targets) if text[: len(of.prompt)] == of.prompt)
    return found


@contextmanager
def noting():
    """Records drafts, and a head's outputs for the target's hidden states."""
    noted, at_hand = Noted(), {}
    placed, hidden = HeadPasses.placed, HeadPasses.hidden
    embedding_at = ImageColumn.embedding_at

    def looking_ahead(self, *arguments):
        found = embedding_at(self, *arguments)
        noted.num_ahead += found is not None
        return found

    def proposing(call):
        def calling(self, request):
            # The first of the passes that follow reads hidden states of the target.
            at_hand.update(texts=request.token_ids_np, first=True)
            if (found := call(self, request)) is None:
                return None
            columns = request.req_indices_np, request.num_tokens_np, found.counts_np
            for index, (req_idx, end, count) in enumerate(zip(*columns, strict=True)):
                if count:
                    drafts = np.array(found.token_ids[index, : int(count)]).tolist()
                    text = request.token_ids_np[req_idx, :end].tolist()
                    noted.drafts.append((text, drafts))
            return found

        return calling

    def placing(self, inputs, rows):
        at_hand["rows"] = rows if at_hand.pop("first", False) else None
        return placed(self, inputs, rows)

    def computing(self, inputs, caches):
        out = hidden(self, inputs, caches)
        if (rows := at_hand["rows"]) is not None:
            starts = rows.query_start_loc_np
            stored = np.ones(starts[-1], bool) if rows.stored_np is None else rows.stored_np
            for index, req_idx in enumerate(rows.req_indices_np):
                of_request = np.arange(starts[index], starts[index + 1])
                of_request = of_request[stored[of_request]]
                first, last = rows.positions_np[of_request[[0, -1]]]
                text = at_hand["texts"][req_idx, : last + 2].tolist()
                noted.rows.append((text, first, out[0][of_request[0] : of_request[-1] + 1]))
        return out

    with pytest.MonkeyPatch.context() as patch:
        for owner in (HeadProposer, BlockProposer, DraftModelProposer, StateProposer):
            for name in ("propose", "complete_draft_kv"):
                patch.setattr(owner, name, proposing(getattr(owner, name)))
        patch.setattr(HeadPasses, "placed", placing)
        patch.setattr(ImageColumn, "embedding_at", looking_ahead)
        patch.setattr(HeadPasses, "hidden", computing)
        mx.disable_compile()  # so that Python computes every pass
        try:
            yield noted
        finally:
            mx.enable_compile()


def serving(drafting, speculates=True, **options):
    """Starts an engine of a toy."""
    settings = {
        "max_model_len": 256,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 4,
        "dtype": "float32",
        "kv_cache_memory_bytes": 16 << 20,
        "additional_config": {"fixed_draft_length": True, "prompt_lookup": False}
        if speculates
        else {"drafts": "off"},
    }
    if speculates:
        settings["speculative_config"] = drafting.speculation
    return engine(str(drafting.folder), **(settings | drafting.options | options))


def answers(llm, prompts, **options):
    """Returns each prompt's greedy and seeded answers, and the number of cached tokens."""
    common = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    wild = {"temperature": 2.0, "allowed_token_ids": FEW}  # random drafts are right at times
    params = [SamplingParams(temperature=0, **common), SamplingParams(seed=1, **wild, **common)]
    given = [
        {"prompt": text} | ({"multi_modal_data": {"image": images}} if images else {})
        for text, images in prompts
    ]
    both = [each for each in params for _ in given]
    outputs = llm.generate(given * 2, both, use_tqdm=False, **options)
    run_out(llm)
    tokens = [(output.prompt_token_ids, list(output.outputs[0].token_ids)) for output in outputs]
    return tokens, [output.num_cached_tokens for output in outputs]


def judge_of(drafting, prompts):
    return drafting.judge([Target(drafting.family, drafting.folder, *of) for of in prompts])
