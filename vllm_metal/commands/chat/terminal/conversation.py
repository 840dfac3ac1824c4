# SPDX-License-Identifier: Apache-2.0
"""A conversation in the terminal, an engine in this process, and one turn between them.

The engine runs in this process: in a child process, it would also get the terminal's Ctrl-C, and
shut down.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

Message = dict[str, str]
# Tokens of a prompt that are computed in one step; Ctrl-C takes effect between steps.
MAX_NUM_BATCHED_TOKENS = 512
# vLLM then takes the longest context that the model allows and the KV cache holds.
AS_FITS = -1


class ChatError(Exception):
    """A turn is not possible; the message says why and what to do."""


@dataclass(frozen=True)
class TurnStats:
    """Figures of one turn, as its user sees them; times in seconds."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    output_tokens: int
    ttft: float  # from the question to the first token
    decode_time: float  # from the first token to the last

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed; None for an answer of one token."""
        if self.output_tokens < 2 or self.decode_time <= 0:
            return None
        return (self.output_tokens - 1) / self.decode_time

    def cells(self) -> list[str]:
        """Prompt tokens, cached tokens, TTFT in ms and tokens per second, as text."""
        speed = self.tokens_per_second
        return [
            str(self.prompt_tokens),
            str(self.cached_tokens),
            f"{1000 * self.ttft:.0f}",
            "–" if speed is None else f"{speed:.1f}",
        ]

    def line(self) -> str:
        """The figures in one line."""
        prompt, cached, ttft, speed = self.cells()
        return f"TTFT {ttft} ms · {speed} tok/s · {prompt} prompt tokens, {cached} cached"


@dataclass(frozen=True)
class Answer:
    """The model's answer in one turn."""

    text: str
    finish: str  # "interrupted", or vLLM's reason: "stop", "length"
    stats: TurnStats | None  # None where it was interrupted before the first token


@dataclass
class Conversation:
    """The system prompt (empty: the chat template's own) and the turns so far, oldest first."""

    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)  # question, answer

    def messages(self, question: str) -> list[Message]:
        """The messages of all turns so far, and of `question`."""
        said = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in self.turns:
            said.append({"role": "user", "content": asked})
            said.append({"role": "assistant", "content": answered})
        return [*said, {"role": "user", "content": question}]

    def make_room(
        self, question: str, num_tokens: Callable[[list[Message]], int], limit: int, reserve: int
    ) -> int:
        """Forgets the oldest turns until `question` and an answer fit the context.

        Args:
            num_tokens: length of messages in tokens.
            limit: tokens of the context.
            reserve: tokens wanted for the answer; not guaranteed if the question alone is long.

        Returns:
            How many turns were forgotten.

        Raises:
            ChatError: the question alone fills the context; nothing is forgotten then.
        """
        alone = num_tokens(Conversation(self.system).messages(question))
        if alone >= limit:
            raise ChatError(
                f"the message and the system prompt take {alone} tokens, and the context is "
                f"{limit}: shorten them, or start with a larger --max-model-len"
            )
        forgotten = 0
        while self.turns and num_tokens(self.messages(question)) + reserve > limit:
            del self.turns[0]
            forgotten += 1
        return forgotten


class ChatEngine:
    """vLLM's engine in this process, with prefix caching, for one request at a time."""

    def __init__(self, model: str, max_model_len: int | None, kv_cache_gib: float) -> None:
        """Loads `model`, a directory or Hub name; `max_model_len` None: as much as fits."""
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

        config = EngineArgs(
            model=model,
            max_model_len=AS_FITS if max_model_len is None else max_model_len,
            max_num_seqs=1,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            enable_prefix_caching=True,
            kv_cache_memory_bytes=int(kv_cache_gib * 2**30),
        ).create_engine_config()
        self._engine = LLMEngine(
            config, Executor.get_class(config), log_stats=False, multiprocess_mode=False
        )
        self._tokenizer = self._engine.renderer.get_tokenizer()
        self._ids = count()

    @property
    def max_model_len(self) -> int:
        """Tokens a prompt and its answer may have together."""
        return self._engine.model_config.max_model_len

    @property
    def block_size(self) -> int:
        """Tokens of a cache block; the prefix cache keeps whole blocks."""
        return self._engine.vllm_config.cache_config.block_size

    def encode(self, messages: list[Message]) -> list[int]:
        """Token ids of `messages` and the start of an answer, by the model's chat template.

        Raises:
            ChatError: the model has no template, or its template refuses the messages.
        """
        try:
            return self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # a template is a program and may raise any error
            raise ChatError(
                f"the model's chat template rejects this conversation ({error}); choose an "
                "instruction-tuned MODEL"
            ) from error

    def generate(
        self, prompt: list[int], params: "SamplingParams", stopped: Callable[[], bool]
    ) -> Iterator["RequestOutput"]:
        """Yields what each step adds to the answer; aborts the request when `stopped()` is true."""
        request_id = f"turn-{next(self._ids)}"
        from vllm import RequestOutput

        (rendered,) = self._engine.renderer.render_cmpl([{"prompt_token_ids": prompt}])
        self._engine.add_request(request_id, rendered, params)
        try:
            while self._engine.has_unfinished_requests() and not stopped():
                for output in self._engine.step():
                    assert isinstance(output, RequestOutput)  # others are of pooling models
                    yield output
        finally:
            if self._engine.has_unfinished_requests():
                self._engine.abort_request([request_id])

    def default_sampling(self) -> dict[str, Any]:
        """Sampling parameters that the model's files name."""
        found = self._engine.model_config.get_diff_sampling_param()
        return {name: value for name, value in found.items() if name != "max_tokens"}

    def close(self) -> None:
        """Frees the model and its memory."""
        self._engine.engine_core.shutdown()


@dataclass(frozen=True)
class AnswerLimits:
    """How an answer is sampled, and its largest number of tokens."""

    max_tokens: int
    temperature: float | None = None  # None: as the model's generation_config.json says


def ask(
    engine: ChatEngine,
    conversation: Conversation,
    question: str,
    limits: AnswerLimits,
    show: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
) -> Answer:
    """One turn: streams the answer to `show` and keeps it in the conversation.

    The conversation must have room (`Conversation.make_room`). If `stopped` ends the answer early,
    the conversation keeps what was generated.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompt = engine.encode(conversation.messages(question))
    sampling = engine.default_sampling()
    if limits.temperature is not None:
        sampling["temperature"] = limits.temperature
    params = SamplingParams(
        **sampling,
        max_tokens=min(limits.max_tokens, engine.max_model_len - len(prompt)),
        output_kind=RequestOutputKind.DELTA,
    )
    started, text, finish = time.perf_counter(), "", "interrupted"
    first = last = started
    num_tokens = num_cached = 0
    for output in engine.generate(prompt, params, stopped):
        delta = output.outputs[0]
        last = time.perf_counter()
        if not num_tokens:
            first, num_cached = last, output.num_cached_tokens or 0
        num_tokens += len(delta.token_ids)
        text += delta.text
        show(delta.text)
        finish = delta.finish_reason or finish
    if text:
        conversation.turns.append((question, text))
    stats = TurnStats(len(prompt), num_cached, num_tokens, first - started, last - first)
    return Answer(text, finish, stats if num_tokens else None)
