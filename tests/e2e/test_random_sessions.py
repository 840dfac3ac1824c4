# SPDX-License-Identifier: Apache-2.0
"""Sessions that come, pause, end and are aborted at random, beside plain requests and resets."""

from dataclasses import dataclass

import numpy as np
import pytest
from e2e.fuzz.models import MAX_LEN, VOCAB
from e2e.harness import Dense, counters, engine, free_blocks, run_out
from e2e.sessions import Session, check, held_rows, step_until, streamed

pytestmark = pytest.mark.more

NUM_SESSIONS, MOST_TURNS = 10, 6
#: Blocks that hold one request of MAX_LEN tokens, see `e2e.fuzz.play`.
BLOCKS = {"full": 18, "windowed": 60, "hybrid": 27}
METHODS = (None, "ngram", "draft_model", "suffix")


@dataclass
class Script:
    """A planned session; a plain request has a single turn."""

    turns: list[list[int]]
    begins: int  # step
    pauses: list[int]  # steps before each turn, from the answer before; negative: sent ahead
    aborted: int | None  # step; None: it is played to its end
    session: Session
    sent: int = 0
    due: int | None = None  # step of the next turn
    over: bool = False


def draw(rng, llm, count):
    shared = rng.integers(2, VOCAB, 40).tolist()
    scripts, step = [], 0
    for number in range(count):
        num_turns = int(rng.integers(1, MOST_TURNS + 1))
        turns = []
        for turn in range(num_turns):
            length = int(rng.choice([1, 2, 5, 15, 16, 17]))
            tokens = rng.integers(2, int(rng.choice([6, VOCAB])), length).tolist()
            turns.append([*shared[: int(rng.integers(0, 41))], *tokens] if turn == 0 else tokens)
        stops = rng.integers(2, VOCAB, int(rng.choice([0, 20, 60]))).tolist() or None
        params = streamed(max_tokens=int(rng.integers(1, 17)), stop_token_ids=stops)
        scripts.append(
            Script(
                turns,
                step,
                [int(rng.choice([-1, -1, 0, 1, 3, 20])) for _ in turns],
                step + int(rng.integers(0, 60)) if rng.random() < 0.2 else None,
                Session(llm, str(number), params),
            )
        )
        step += int(rng.choice([0, 0, 1, 4]))
    return scripts


def send_due(script, step):
    """Sends what is due at a step; returns whether the script is over."""
    session = script.session
    if script.over or step < script.begins:
        return script.over
    if script.aborted is not None and step >= script.aborted:
        session.llm.llm_engine.abort_request([session.req_id], internal=True)
        script.over = True
        return True
    while script.sent < len(script.turns):
        pause = script.pauses[script.sent]
        if script.sent and pause >= 0:
            if len(session.answers) < script.sent:
                return False
            script.due = step + pause if script.due is None else script.due
            if step < script.due:
                return False
        session.send(script.turns[script.sent])
        script.sent, script.due = script.sent + 1, None
        if script.sent == len(script.turns):
            session.close()
    script.over = len(session.answers) == len(script.turns)
    return script.over


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in range(2, 47))]
)
def test_every_turn_of_every_session_is_right(tiny_models, seed):
    rng = np.random.default_rng(seed)
    name, method = str(rng.choice(list(BLOCKS))), METHODS[int(rng.integers(len(METHODS)))]
    model, dense = str(tiny_models / name), Dense(str(tiny_models / name))
    config = {"method": method, "num_speculative_tokens": int(rng.integers(1, 5))}
    if method == "ngram":
        config |= {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
    if method == "draft_model":
        config["model"] = str(tiny_models / f"{name}-draft")
    with engine(
        model,
        skip_tokenizer_init=True,
        max_model_len=MAX_LEN,
        max_num_seqs=int(rng.integers(2, 6)),
        max_num_batched_tokens=int(rng.choice([40, 64, 256])),
        num_gpu_blocks_override=BLOCKS[name] + int(rng.choice([4, 12, 200])),
        speculative_config=config if method else None,
        async_scheduling=method != "suffix" and bool(rng.random() < 0.6),
        enable_prefix_caching=bool(rng.random() < 0.8),
        additional_config={"fixed_draft_length": True, "max_step_ms": None},
    ) as llm:
        free, scripts, step = free_blocks(llm), draw(rng, llm, NUM_SESSIONS), 0
        resets = set(rng.integers(1, 80, int(rng.integers(0, 3))).tolist())

        def go_on():
            nonlocal step
            if step in resets:
                llm.reset_prefix_cache(reset_running_requests=True)
            step += 1
            return all([send_due(script, step) for script in scripts])

        step_until(llm, [script.session for script in scripts], go_on)
        for script in scripts:
            answers = script.session.answers
            if script.aborted is None:
                assert script.session.finished
            assert all(reason in ("length", "stop") for reason, _ in script.session.reasons)
            check(dense, script.turns[: len(answers)], answers)
        run_out(llm)
        assert free_blocks(llm) == free and held_rows(llm) == 0
        assert counters(llm)["vllm:generation_tokens"] > 0
