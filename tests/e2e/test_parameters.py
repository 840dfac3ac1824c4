# SPDX-License-Identifier: Apache-2.0
"""Each field of a request or engine configuration changes the result."""

from types import SimpleNamespace

import pytest
from e2e.harness import engine, generate, greedy, text_tokens
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams, RepetitionDetectionParams, RequestOutputKind
from vllm_settings.row import named_test
from vllm_settings.sampling import SAMPLING_PARAMS

SPECIAL = 1  # <|im_start|> of SmolLM2
EOS = 2
LETTER = 99


@pytest.fixture(scope="module")
def llm(short):
    with engine(short, max_model_len=256) as started:
        yield started


@pytest.fixture(scope="module")
def answer(llm, short):
    """Sends a request as the server does; returns all its outputs by step."""
    prompt = text_tokens(short)[:40]
    numbers = iter(range(1000))

    def ask(**fields):
        settings = {"temperature": 0, "max_tokens": 12, "ignore_eos": True} | fields
        prompts = {"prompt_token_ids": prompt}
        llm.llm_engine.add_request(str(next(numbers)), prompts, SamplingParams(**settings))
        lengths, choices = [], {}
        while llm.llm_engine.has_unfinished_requests():
            for step in llm.llm_engine.step():
                lengths += [len(output.token_ids) for output in step.outputs]
                choices |= {output.index: output for output in step.outputs}
                cached = step.num_cached_tokens
        last = choices[0]
        return SimpleNamespace(
            lengths=lengths,  # of each output, whose tokens may grow with the next
            choices=len(choices),
            text=last.text,
            tokens=list(last.token_ids),
            end=(last.finish_reason, last.stop_reason),
            logprobs=type(last.logprobs).__name__,
            cached=cached,
        )

    ask()  # whatever comes later finds the prompt in the cache
    return SimpleNamespace(to=ask, plain=ask())


def letters(answer):
    """Returns a few letters of the plain answer."""
    return answer.plain.text[4:7]


def n(answer):
    assert answer.plain.choices == 1
    assert answer.to(n=3, temperature=1).choices == 3


def stop(answer):
    found, end = answer.to(stop=[letters(answer)]), ("stop", letters(answer))
    assert found.end == end
    assert found.text == answer.plain.text.partition(letters(answer))[0]


def include_stop_str_in_output(answer):
    found = answer.to(stop=[letters(answer)], include_stop_str_in_output=True)
    before, stopped, _ = answer.plain.text.partition(letters(answer))
    assert found.text == before + stopped


def stop_token_ids(answer):
    tokens = answer.plain.tokens
    found = answer.to(stop_token_ids=[tokens[3]])
    assert found.end == ("stop", tokens[3])
    assert found.tokens == tokens[: tokens.index(tokens[3]) + 1]


def ignore_eos(answer):
    always = {"logit_bias": {EOS: 100.0}}
    assert answer.to(**always, ignore_eos=False).tokens == [EOS]
    assert answer.to(**always, ignore_eos=True).tokens == [EOS] * 12


def max_tokens(answer):
    found = answer.to(max_tokens=5)
    assert (found.tokens, found.end) == (answer.plain.tokens[:5], ("length", None))


def flat_logprobs(answer):
    assert answer.to(logprobs=1).logprobs == "list"
    assert answer.to(logprobs=1, flat_logprobs=True).logprobs == "FlatLogprobs"


def detokenize(answer):
    found = answer.to(detokenize=False)
    assert (found.text, found.tokens) == ("", answer.plain.tokens)


def skip_special_tokens(answer):
    always = {"allowed_token_ids": [SPECIAL], "max_tokens": 2}
    assert answer.to(**always).text == ""
    assert answer.to(**always, skip_special_tokens=False).text == "<|im_start|>" * 2


def output_kind(answer):
    assert answer.to(output_kind=RequestOutputKind.CUMULATIVE).lengths == list(range(1, 13))
    assert answer.to(output_kind=RequestOutputKind.DELTA).lengths == [1] * 12
    assert answer.to(output_kind=RequestOutputKind.FINAL_ONLY).lengths == [12]


def stream_interval(answer):
    found = answer.to(output_kind=RequestOutputKind.DELTA, stream_interval=5)
    assert found.lengths == [1, 5, 5, 1]


def repetition_detection(answer):
    always = {"allowed_token_ids": [LETTER]}
    assert len(answer.to(**always).tokens) == 12
    detection = RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=1, min_count=4)
    assert len(answer.to(**always, repetition_detection=detection).tokens) == 4


def skip_reading_prefix_cache(answer):
    assert answer.plain.cached == 32
    assert answer.to(skip_reading_prefix_cache=True).cached == 0


EFFECTS = (
    n,
    stop,
    include_stop_str_in_output,
    stop_token_ids,
    ignore_eos,
    max_tokens,
    flat_logprobs,
    detokenize,
    skip_special_tokens,
    output_kind,
    stream_interval,
    repetition_detection,
    skip_reading_prefix_cache,
)


@pytest.mark.parametrize("effect", EFFECTS, ids=lambda effect: effect.__name__)
def test_a_field_changes_the_answer(answer, effect):
    effect(answer)


def test_every_field_that_the_table_says_is_shown_here_is():
    ours = ("e2e/test_parameters.py", "test_a_field_changes_the_answer")
    said = {name for name, row in SAMPLING_PARAMS.items() if named_test(row) == ours}
    assert said == {effect.__name__ for effect in EFFECTS}


@pytest.mark.more
def test_a_beam_is_the_greedy_text_and_more_find_one_as_likely(llm, short):
    prompt = {"prompt_token_ids": text_tokens(short)[:20]}

    def best(width):
        params = BeamSearchParams(beam_width=width, max_tokens=6, ignore_eos=True)
        (found,) = llm.beam_search([prompt], params)
        assert len(found.sequences) == width
        return found.sequences[0]

    one, several = best(1), best(4)
    assert one.tokens[20:] == generate(llm, [prompt["prompt_token_ids"]], greedy(6))[0]
    assert several.cum_logprob >= one.cum_logprob - 1e-3


def scheduled(tiny, tiny_text, **options):
    """Of three prompts of 100 tokens: in any step, the most tokens of all requests, of one beside
    others, and the most requests."""
    steps = []
    with engine(tiny, max_model_len=160, **options) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def recording(*args, **kwargs):
            output = schedule(*args, **kwargs)
            steps.append((dict(output.num_scheduled_tokens), len(scheduler.running)))
            return output

        scheduler.schedule = recording
        prompts = [{"prompt_token_ids": tiny_text[31 * i : 31 * i + 100]} for i in range(3)]
        outputs = llm.generate(
            prompts, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False
        )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3] * 3
    return (
        max(sum(of_step.values()) for of_step, _ in steps),
        max((max(of_step.values()) for of_step, _ in steps if len(of_step) > 1), default=0),
        max(running for _, running in steps),
    )


@pytest.mark.more
def test_a_limit_of_the_scheduler_holds(tiny, tiny_text):
    assert scheduled(tiny, tiny_text) == (256, 100, 3)
    assert scheduled(tiny, tiny_text, max_num_scheduled_tokens=48)[0] == 48
    assert scheduled(tiny, tiny_text, max_num_active_seqs=2)[2] == 2
    assert scheduled(tiny, tiny_text, long_prefill_token_threshold=16)[1] == 16
