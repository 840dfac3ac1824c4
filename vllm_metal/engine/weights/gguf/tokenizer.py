# SPDX-License-Identifier: Apache-2.0
"""Builds tokenizer.json and tokenizer_config.json from the vocabulary in GGUF metadata.

GGUF stores the whole vocabulary, but only the *name* of the pre-tokenization pattern
(`tokenizer.ggml.pre`). The patterns here come from each model's released tokenizer.json. Unknown
names are rejected: a similar pattern would encode most text correctly and some incorrectly.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from .source import ConversionError, GGUFSource

# Token types of GGUF (`tokenizer.ggml.token_type`) that are not handled like NORMAL.
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
_SPACE = "\u2581"  # SentencePiece's symbol for a space
Merges = list[tuple[str, str]]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_TAIL}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Name -> pattern; None for GPT-2's pattern, which is built into the library.
_PATTERNS: Mapping[str, str | None] = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
#: Names whose pre-tokenizer splits numbers into digits.
_SINGLE_DIGITS = frozenset({"smollm"})
#: Names with Unicode normalization.
_NFC = frozenset({"qwen2", "deepseek-r1-qwen"})
#: Names whose words are looked up in the vocabulary before any merges.
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})
#: Names that add a begin token unless the file says otherwise.
_BOS_BY_DEFAULT = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def write_tokenizer(source: GGUFSource, out: Path) -> None:
    """Writes the tokenizer of `source` into the directory `out`.

    Raises ConversionError: the vocabulary type or the pre-tokenization pattern is unknown.
    """
    tokens: list[str] = source.require("tokenizer.ggml.tokens")
    tokenizer = build_tokenizer(source, tokens)
    tokenizer.save(str(out / "tokenizer.json"))
    config = _tokenizer_config(source, tokens)
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (out / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def copy_tokenizer(directory: Path, out: Path) -> None:
    """Copies the tokenizer files of a model directory instead of building them."""
    names = [name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    if not {"tokenizer.json", "tokenizer.model"} & set(names):
        raise ConversionError(
            f"--tokenizer {directory} has neither tokenizer.json nor tokenizer.model"
        )
    for name in names:
        shutil.copyfile(directory / name, out / name)


def build_tokenizer(source: GGUFSource, tokens: list[str]) -> Tokenizer:
    """Builds a `tokenizers.Tokenizer` that encodes as the model of `source` was trained to."""
    kind = source.require("tokenizer.ggml.model")
    types: list[int] = source.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if kind == "gpt2":
        tokenizer, bos = _byte_level(source, tokens)
    elif kind == "llama":
        merges = _merges_by_score(source, tokens, types)
        tokenizer, bos = _byte_fallback(source, tokens, types, merges), True
    elif kind == "gemma4":
        parted = (merge.partition(" ") for merge in source.require("tokenizer.ggml.merges"))
        merges = [(left, right) for left, _, right in parted]
        tokenizer, bos = _byte_fallback(source, tokens, types, merges), True
    else:
        raise ConversionError(
            f"{source.path}: tokenizer {kind!r} (tokenizer.ggml.model) cannot be converted; "
            "supported: gpt2, llama, gemma4. Pass --tokenizer with the directory of the original "
            "model"
        )
    for special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [t for t, token_type in zip(tokens, types, strict=True) if token_type == wanted]
        added_tokens = [AddedToken(token, special=special, normalized=False) for token in added]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added_tokens)
    _add_template(tokenizer, source, tokens, bos)
    return tokenizer


def _byte_level(source: GGUFSource, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Builds byte-level BPE; also returns whether texts get a begin token by default."""
    pre = source.get("tokenizer.ggml.pre", "default")
    if pre not in _PATTERNS:
        raise ConversionError(
            f"{source.path}: text splitting {pre!r} (tokenizer.ggml.pre) is not known; known: "
            f"{', '.join(_PATTERNS)}. Pass --tokenizer with the directory of the original model"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in source.require("tokenizer.ggml.merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    except Exception as error:  # the library raises nothing narrower
        raise ConversionError(f"{source.path}: broken vocabulary: {error}") from error
    tokenizer = Tokenizer(model)
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    pattern = _PATTERNS[pre]
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre in _SINGLE_DIGITS:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre in _BOS_BY_DEFAULT


def _merges_by_score(source: GGUFSource, tokens: list[str], types: list[int]) -> Merges:
    """Derives the merges of SentencePiece's BPE.

    SentencePiece joins the adjacent pair whose union has the best score. So every split of a piece
    into two pieces becomes a merge, in the order of the pieces' scores.
    """
    scores: list[float] = source.require("tokenizer.ggml.scores")
    plain = {
        token: i
        for i, (token, token_type) in enumerate(zip(tokens, types, strict=True))
        if token_type not in (_CONTROL, _USER_DEFINED, _BYTE)
    }
    merges: list[tuple[float, int, int, str, str]] = []
    for token, i in plain.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in plain and right in plain:
                merges.append((-scores[i], plain[left], plain[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _byte_fallback(
    source: GGUFSource, tokens: list[str], types: list[int], merges: Merges
) -> Tokenizer:
    """Builds BPE over characters, with bytes for those missing in the vocabulary.

    If the file adds a space before texts, text after a special token gets one, too, as in llama.cpp
    and Llama 2's own files.
    """
    unknown = source.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    steps: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if source.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _add_template(tokenizer: Tokenizer, source: GGUFSource, tokens: list[str], bos: bool) -> None:
    """Adds begin and end tokens around texts if the file asks for them."""
    before: list[tuple[str, int]] = []
    after: list[tuple[str, int]] = []
    for role, side, default in (("bos", before, bos), ("eos", after, False)):
        token = source.get(f"tokenizer.ggml.{role}_token_id")
        if token is not None and source.get(f"tokenizer.ggml.add_{role}_token", default):
            side.append((tokens[token], token))
    steps: list[Any] = []
    if source.require("tokenizer.ggml.model") == "gpt2":
        steps.append(processors.ByteLevel(trim_offsets=False))
    if before or after:
        first, last = [t for t, _ in before], [t for t, _ in after]
        steps.append(
            processors.TemplateProcessing(
                single=[*first, "$A", *last],
                pair=[*first, "$A", *last, *[f"{t}:1" for t in first], "$B:1"]
                + [f"{t}:1" for t in last],
                special_tokens=[*before, *after],
            )
        )
    if steps:
        tokenizer.post_processor = processors.Sequence(steps)


def _tokenizer_config(source: GGUFSource, tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        # This class loads tokenizer.json unchanged; those of single models rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.require_arch("context_length"),
        "clean_up_tokenization_spaces": False,
    }
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for ours, theirs in roles.items():
        if (token := source.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            config[f"{ours}_token"] = tokens[token]
    if template := source.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
