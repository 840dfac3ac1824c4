# SPDX-License-Identifier: Apache-2.0
"""Streaming input sessions: every turn is answered like its whole text at once."""

import asyncio
import itertools

import numpy as np
import pytest
from e2e.disk import HITS, STORED, disk_engine
from e2e.fuzz.models import VOCAB
from e2e.harness import Dense, counters, engine, free_blocks, generate, greedy, run_out
from e2e.sessions import (
    Session,
    ask_once,
    check,
    held_rows,
    play,
    step_until,
    streamed,
    whole_texts,
)
from vllm import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.inputs import tokens_input
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_metal.engine.models.executor import ModelExecutor

NUM_TURNS, MAX_TOKENS = 5, 8
STOPS = list(range(3, VOCAB, 9))  # so many that about every other turn ends at one
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}


def scripts_of(count, seed=0):
    """Makes session turns; two sessions share a prefix, and turns are repetitive."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(2, VOCAB, 36).tolist()
    found = []
    for index in range(count):
        turns = []
        for number in range(NUM_TURNS):
            turn = rng.integers(2, VOCAB, int(rng.integers(1, 9))).tolist()
            turns.append((shared if number == 0 and index % 2 else []) + turn * (1 + number % 3))
        found.append(turns)
    return found


def draft_model(folder, name):
    return {
        "method": "draft_model",
        "model": str(folder / f"{name}-draft"),
        "num_speculative_tokens": 3,
    }


def small_engine(model, **options):
    settings = {
        "skip_tokenizer_init": True,
        "max_model_len": 160,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "additional_config": {"fixed_draft_length": True},
    }
    return engine(model, **(settings | options))


def assert_nothing_is_held(llm, free):
    run_out(llm)
    assert free_blocks(llm) == free, "blocks were never freed"
    assert held_rows(llm) == 0, "the worker still knows requests"


#: Engines by what is special about them.
SPECULATION = {"plain": None, "ngram": NGRAM, "draft model": "draft"}


#: Pool sizes without room for four sessions at once. Their use depends on the texts of random
#: models, and so on the BLAS: windowed is the least for a request of max_model_len, and with a few
#: less in hybrid, no hits remain.
BLOCKS = {"full": 12, "windowed": 33, "hybrid": 28}
#: Model, speculation, whether steps overlap, and what ends turns. Those that `make test` plays.
QUICK = {("hybrid", "ngram", "async", "stop tokens")}
#: Further cases in CI.
MORE = {
    ("full", "draft model", "async", "max_tokens"),
    ("windowed", "draft model", "async", "stop tokens"),
}
ALL = itertools.product(
    ("full", "windowed", "hybrid"), SPECULATION, ("async", "sync"), ("max_tokens", "stop tokens")
)


def marked(case):
    marks = () if case in QUICK else pytest.mark.more if case in MORE else pytest.mark.slow
    return pytest.param(*case, marks=marks, id=", ".join(case))


@pytest.mark.parametrize(
    ("name", "speculation", "scheduling", "ends"), [marked(case) for case in ALL]
)
def test_five_turns(tiny_models, name, speculation, scheduling, ends):
    """Two rounds: all turns sent ahead, and each when the one before was answered.

    In the first the pool has no room for all that runs, so turns are preempted. In the second
    sessions begin as those of the first did.
    """
    model, dense = str(tiny_models / name), Dense(str(tiny_models / name))
    config = SPECULATION[speculation]
    if config == "draft":
        config = draft_model(tiny_models, name)
    # Lookup drafts little that is right in the texts of "full", and nothing in short turns.
    stops = STOPS[::9] if name == "full" else STOPS
    params = streamed(
        max_tokens=MAX_TOKENS, stop_token_ids=stops if ends == "stop tokens" else None
    )
    with small_engine(
        model,
        speculative_config=config,
        async_scheduling=scheduling == "async",
        num_gpu_blocks_override=BLOCKS[name],
    ) as llm:
        free = free_blocks(llm)
        for ahead in (True, False):
            scripts = {
                Session(llm, f"{ahead} {number}", params): turns
                for number, turns in enumerate(scripts_of(4))
            }
            play(llm, scripts, ahead)
            for session, turns in scripts.items():
                check(dense, turns, session.answers)
                for answer, (reason, stop) in zip(session.answers, session.reasons, strict=True):
                    at_stop = ends == "stop tokens" and answer[-1] in stops
                    assert (reason, stop) == (("stop", answer[-1]) if at_stop else ("length", None))
                    assert at_stop or len(answer) == MAX_TOKENS
            assert_nothing_is_held(llm, free)
        found = counters(llm)
        assert found["vllm:num_preemptions"] > 0
        assert found["vllm:prefix_cache_hits"] > 0
        if config:
            # The hybrid's draft network knows nothing of it: by luck one of VOCAB drafts is right.
            guesses = (name, speculation) != ("hybrid", "draft model")
            kind = "accepted" if guesses else "draft"
            assert found[f"vllm:spec_decode_num_{kind}_tokens"] > 0
        # Asked at once, the longest texts get the same answers.
        whole = {session: whole_texts(turns, session.answers) for session, turns in scripts.items()}
        asked = generate(
            llm,
            [texts[-1] for texts in whole.values()],
            greedy(MAX_TOKENS, detokenize=False, stop_token_ids=params.stop_token_ids),
        )
        assert asked == [session.answers[-1] for session in whole]


#: Settings that all affect the texts: likely tokens are repeated, penalised or drawn.
SAMPLING = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.5},
    "seed": {"temperature": 1.0, "seed": 7, "top_k": 20},
    "bad words and bias": {"logit_bias": {5: 4.0}, "min_tokens": 4, "stop_token_ids": STOPS},
}


def test_each_turn_samples_as_a_request_of_its_own(tiny):
    """The text before a turn is its prompt; each turn has its own parameters."""
    dense = Dense(tiny)
    turns, settings = (
        scripts_of(2)[1],
        [*({"logprobs": 2} | options for options in SAMPLING.values()), {"logprobs": 2}],
    )
    with small_engine(tiny, max_num_seqs=2, speculative_config=NGRAM) as llm:
        free = free_blocks(llm)
        session = Session(llm, "session", streamed(max_tokens=MAX_TOKENS))
        for turn, options in zip(turns, settings, strict=True):
            session.ask(turn, streamed(**({"max_tokens": MAX_TOKENS} | options)))
        session.close()
        texts = whole_texts(turns, session.answers)
        for text, answer, options in zip(texts, session.answers, settings, strict=True):
            params = streamed(**({"max_tokens": MAX_TOKENS} | options))
            assert ask_once(llm, text, params).answers == [answer], options
        assert_nothing_is_held(llm, free)
    for at in (0, NUM_TURNS - 1):  # the turns that set nothing else
        text, answer = texts[at], session.answers[at]
        rows = dense.logits([*text, *answer[:-1]])[len(text) - 1 :].astype(np.float64)
        expected = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        for row, token, found in zip(expected, answer, session.logprobs[at], strict=True):
            assert token == row.argmax()
            assert found[token].logprob == pytest.approx(row[token], abs=1e-3)


@pytest.mark.parametrize("name", ["full", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_a_session_between_turns_gives_its_blocks_to_who_waits(tiny_models, name):
    model, dense = str(tiny_models / name), Dense(str(tiny_models / name))
    turns, (other,) = scripts_of(2)[1], scripts_of(1, seed=5)[:1]
    blocks = {"full": 11, "hybrid": 21}[name]
    with small_engine(model, num_gpu_blocks_override=blocks) as llm:
        free = free_blocks(llm)
        session = Session(llm, "session", streamed(max_tokens=MAX_TOKENS))
        for turn in turns:
            session.ask(turn)
            prompt = (other[0] * 40)[: 16 * 8]
            once = ask_once(llm, prompt, streamed(max_tokens=MAX_TOKENS))
            dense.check(prompt, once.answers[0])
        session.close()
        check(dense, turns, session.answers)
        assert_nothing_is_held(llm, free)


@pytest.mark.more
@pytest.mark.parametrize("name", ["hybrid", pytest.param("full", marks=pytest.mark.slow)])
def test_a_pool_that_is_lost_between_two_turns(tiny_models, name, monkeypatch):
    model, dense = str(tiny_models / name), Dense(str(tiny_models / name))
    turns, prompt = scripts_of(2)[1], [4, 5, 6]
    with small_engine(model, enable_sleep_mode=True) as llm:
        free = free_blocks(llm)
        session = Session(llm, "session", streamed(max_tokens=MAX_TOKENS))
        for number, turn in enumerate(turns, 1):
            session.ask(turn)
            if number == 2:
                with monkeypatch.context() as patch:
                    patch.setattr(ModelExecutor, "forward_hidden", _raise)
                    (reason,) = ask_once(llm, prompt, streamed(max_tokens=2)).reasons
                assert reason[0] == "error"
            if number == 3:
                llm.llm_engine.sleep(1, mode="keep")  # else vLLM aborts all there is
                llm.llm_engine.wake_up()
        session.close()
        check(dense, turns, session.answers)
        assert_nothing_is_held(llm, free)


def _raise(*arguments):
    raise RuntimeError("a step that fails")


def test_a_session_whose_step_fails_has_ended(tiny, monkeypatch):
    """Later input does not start it again."""
    turns, dense = scripts_of(1)[0], Dense(tiny)
    with small_engine(tiny) as llm:
        free = free_blocks(llm)
        session = Session(llm, "session", streamed(max_tokens=MAX_TOKENS))
        session.ask(turns[0])
        session.send(turns[1])
        session.send(turns[2])
        with monkeypatch.context() as patch:
            patch.setattr(ModelExecutor, "forward_hidden", _raise)
            llm.llm_engine.step()
        step_until(llm, [session], lambda: session.finished)
        (first, second) = session.reasons
        assert first == ("length", None)
        assert second[0] == "error" and "a step that fails" in second[1]
        assert_nothing_is_held(llm, free)
        (answer,) = generate(llm, [turns[0]], greedy(MAX_TOKENS, detokenize=False))
        dense.check(turns[0], answer)


@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.more)])
def test_a_session_that_grows_too_long(tiny, ahead):
    turns, dense = scripts_of(1)[0], Dense(tiny)
    turns[2] = (turns[2] * 140)[:140]
    with small_engine(tiny) as llm:
        free = free_blocks(llm)
        session = Session(llm, "session", streamed(max_tokens=MAX_TOKENS))
        beside = Session(llm, "beside", streamed(max_tokens=4 * MAX_TOKENS))
        for turn in turns[:3]:
            send = session.send if ahead or turn is turns[2] else session.ask
            send(turn)
        beside.send(turns[0])
        beside.close()
        step_until(llm, [session, beside], lambda: session.finished and beside.finished)
        check(dense, turns[:2], session.answers[:2])
        check(dense, turns[:1], beside.answers)
        reason, why = session.reasons[2]
        assert reason == "error" and "--max-model-len is 160" in why
        assert session.answers[2:] == [[]]
        assert_nothing_is_held(llm, free)


def test_a_session_has_one_salt(tiny):
    turns = scripts_of(1)[0]
    with small_engine(tiny) as llm:
        free = free_blocks(llm)
        for salts, error in ((("a", None, "a"), False), (("a", "b"), True)):
            session = Session(llm, str(salts), streamed(max_tokens=MAX_TOKENS))
            for number, salt in enumerate(salts, 1):
                session.ask(turns[number], salt=salt)
            assert (session.reasons[-1][0] == "error") == error == session.finished
            if error:
                assert "cache_salt" in session.reasons[-1][1]
            else:
                session.close()
        assert_nothing_is_held(llm, free)


def test_what_a_session_cannot_have_is_refused_by_name(tiny):
    with small_engine(tiny) as llm:
        session = Session(llm, "session", streamed(max_tokens=2))
        for setting in (
            {"prompt_logprobs": 1},
            {"structured_outputs": StructuredOutputsParams(regex="a+")},
        ):
            with pytest.raises(ValueError, match=f"{next(iter(setting))} is not supported in str"):
                session.send([3, 4], streamed(max_tokens=2, **setting))
        session.ask([3, 4])
        with pytest.raises(ValueError, match=r"logprobs=1 is not .* first turn sets None"):
            session.send([3, 4], streamed(max_tokens=2, logprobs=1))
        session.ask([3, 4])
        session.close()
        assert len(session.answers) == 2


@pytest.mark.more
@pytest.mark.parametrize(
    "name", ["windowed", *(pytest.param(n, marks=pytest.mark.slow) for n in ("full", "hybrid"))]
)
def test_turns_leave_sound_blocks_on_disk(tiny_models, tmp_path, name):
    """Another engine loads the turns' blocks and continues."""
    model, dense = str(tiny_models / name), Dense(str(tiny_models / name))
    scripts = scripts_of(2, seed=3)
    options = {"skip_tokenizer_init": True, "max_num_seqs": 4, "max_model_len": 256}
    with disk_engine(model, tmp_path, **options) as llm:
        sessions = [
            Session(llm, str(number), streamed(max_tokens=MAX_TOKENS)) for number in range(2)
        ]
        play(llm, dict(zip(sessions, scripts, strict=True)))
        for session, turns in zip(sessions, scripts, strict=True):
            check(dense, turns, session.answers)
        run_out(llm)
        assert counters(llm)[STORED] > 0 and held_rows(llm) == 0
    texts = [
        whole_texts(turns, session.answers)[-1]
        for session, turns in zip(sessions, scripts, strict=True)
    ]
    with disk_engine(model, tmp_path, **options) as llm:
        answers = generate(llm, texts, greedy(MAX_TOKENS, detokenize=False))
        for text, answer in zip(texts, answers, strict=True):
            dense.check(text, answer)
        assert counters(llm)[HITS] >= 3 * 16  # windows of groups bound what can be begun with
        session = Session(llm, "again", streamed(max_tokens=MAX_TOKENS))
        play(llm, {session: scripts[1]})
        check(dense, scripts[1], session.answers)


@pytest.mark.more
def test_vllms_own_front_end(tiny, monkeypatch):
    """Sends five turns of three sessions over two rows through `AsyncLLM.generate`."""
    # A forked child has none of the threads that MLX has in this process.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    dense, scripts = Dense(tiny), scripts_of(3)

    async def turns_of(turns, answered):
        for number, turn in enumerate(turns):
            if number % 2:  # the others are sent while the turn before is answered
                await answered[number - 1].wait()
            yield StreamingInput(prompt=tokens_input(list(turn)))  # vLLM lengthens it

    async def session(llm, name, turns):
        answered, answers, new = [asyncio.Event() for _ in turns], [], []
        params = streamed(max_tokens=MAX_TOKENS)
        async for output in llm.generate(turns_of(turns, answered), params, name):
            (completion,) = output.outputs
            new += completion.token_ids
            while len(new) >= MAX_TOKENS:  # outputs of two turns may come as one
                answered[len(answers)].set()
                answers.append(new[:MAX_TOKENS])
                del new[:MAX_TOKENS]
        assert not new
        return answers

    async def serve():
        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                tiny,
                skip_tokenizer_init=True,
                max_model_len=256,
                max_num_seqs=2,
                kv_cache_memory_bytes=8 << 20,
            )
        )
        try:
            async with asyncio.timeout(500):
                found = await asyncio.gather(
                    *(session(llm, str(number), turns) for number, turns in enumerate(scripts))
                )
            with pytest.raises(
                ValueError, match="prompt_logprobs is not supported in streaming sessions"
            ):
                params = streamed(max_tokens=2, prompt_logprobs=0)
                async for _ in llm.generate(turns_of(scripts[0], []), params, "refused"):
                    pass
            return found
        finally:
            llm.shutdown()

    for turns, answers in zip(scripts, asyncio.run(serve()), strict=True):
        check(dense, turns, answers)
