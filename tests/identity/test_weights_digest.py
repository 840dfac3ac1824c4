# SPDX-License-Identifier: Apache-2.0
"""Digests of weights cover every byte and name, and read files once."""

import json
import os
import stat
import time

import blake3
import mlx.core as mx
import numpy as np
import pytest
from patches.vllm_patches import doubles
from vllm_settings.configured import configure

from vllm_metal.identity import weights_digest
from vllm_metal.identity.weights_digest import digest

LONG_AGO = time.time_ns() - 10**12


def write(path, content, changed_ns=LONG_AGO):
    path.write_bytes(content)
    os.utime(path, ns=(changed_ns, changed_ns))
    return path


def expected(contents):
    """The definition: names and digests of files, in the order of names."""
    listed = sorted((name, blake3.blake3(data).hexdigest()[:32]) for name, data in contents.items())
    return blake3.blake3(json.dumps([list(pair) for pair in listed]).encode()).hexdigest()[:32]


@pytest.fixture
def contents():
    rng = np.random.default_rng(1)
    sizes = {"model-1.safetensors": 3_000_001, "model-2.safetensors": 70_000, "empty": 0}
    return {name: rng.bytes(size) for name, size in sizes.items()}


@pytest.fixture
def files(tmp_path, contents):
    return [write(tmp_path / name, data) for name, data in contents.items()]


@pytest.fixture
def read(monkeypatch):
    """Names of the files whose contents are read."""
    found = []
    real = blake3.blake3.update_mmap

    class Hasher:
        AUTO = blake3.blake3.AUTO

        def __init__(self, *args, **options):
            self.hasher = blake3.blake3(*args, **options)

        def update_mmap(self, path):
            found.append(path.name)
            real(self.hasher, path)
            return self

        def hexdigest(self, length):
            return self.hasher.hexdigest(length=length)

    class Module:
        blake3 = Hasher

    monkeypatch.setattr(weights_digest, "blake3", Module)
    return found


def test_the_digest_is_of_names_and_contents(files, contents):
    assert digest(files, None) == expected(contents)
    assert digest(files[::-1], None) == expected(contents)
    assert digest([], None) == expected({})


def test_every_change_shows(files, contents, tmp_path):
    seen = {digest(files, None)}
    flipped = bytearray(contents["model-1.safetensors"])
    flipped[2_000_000] ^= 1
    write(files[0], bytes(flipped))
    seen.add(digest(files, None))
    write(files[0], contents["model-1.safetensors"][:-1])
    seen.add(digest(files, None))
    seen.add(digest(files[:2], None))
    renamed = files[1].rename(tmp_path / "model-3.safetensors")
    seen.add(digest([files[0], renamed], None))
    assert len(seen) == 5


def test_a_remembered_file_is_not_read(files, contents, tmp_path, read):
    memo = tmp_path / "below" / "memo.json"
    assert digest(files, memo) == expected(contents)
    assert sorted(read) == sorted(contents)
    read.clear()
    assert digest(files, memo) == expected(contents)
    assert read == []
    assert stat.S_IMODE(memo.stat().st_mode) == 0o600
    assert os.listdir(memo.parent) == ["memo.json"]


@pytest.mark.parametrize("change", ["time", "inode", "size"])
def test_a_changed_file_is_read_again(files, contents, tmp_path, read, change):
    memo = tmp_path / "memo.json"
    digest(files, memo)
    read.clear()
    other = bytes(70_000) if change != "size" else bytes(70_001)
    if change == "inode":  # as a download puts a file in the place of another
        os.replace(write(tmp_path / "new", other), files[1])
    else:  # the same size in the one case; the same time in the other
        write(files[1], other, LONG_AGO + (change == "time"))
    assert digest(files, memo) == expected(contents | {"model-2.safetensors": other})
    assert read == ["model-2.safetensors"]


def test_a_file_of_the_same_size_inode_and_mtime_is_read_again(files, contents, tmp_path):
    memo = tmp_path / "memo.json"
    digest(files, memo)
    other = bytes(70_000)
    write(files[1], other)  # in place, as with archives whose files all have one time
    assert digest(files, memo) == expected(contents | {"model-2.safetensors": other})


def test_a_file_that_changed_just_now_is_read_each_time(files, contents, tmp_path, read):
    """A second change could keep size and time where clocks are coarse."""
    memo = tmp_path / "memo.json"
    now = time.time_ns()
    write(files[1], bytes(70_000), now)
    digest(files, memo)
    other = b"\1" * 70_000
    write(files[1], other, now)
    assert digest(files, memo) == expected(contents | {"model-2.safetensors": other})


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"7", b'"x"', b"\xff", None, b'{"%s": 5}', b'{"%s": [1, 2]}']
)
def test_a_memo_that_cannot_be_used_costs_time_only(files, contents, tmp_path, content):
    memo = tmp_path / "memo.json"
    if content is None:
        memo.mkdir()
    else:
        memo.write_bytes(content.replace(b"%s", str(files[0]).encode()))
    assert digest(files, memo) == expected(contents)
    assert digest(files, memo) == expected(contents)


def test_a_memo_forgets_files_that_are_gone(files, contents, tmp_path):
    memo = tmp_path / "memo.json"
    digest(files, memo)
    files[0].unlink()
    write(files[1], bytes(9))
    digest(files[1:], memo)
    assert sorted(json.loads(memo.read_bytes())) == sorted(map(str, files[1:]))


def test_a_missing_file_raises(tmp_path):
    with pytest.raises(OSError, match="none"):
        digest([tmp_path / "none"], None)


@pytest.fixture
def model(tmp_path):
    """A folder with a configuration and weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(doubles.MODEL))
    weights = {"model.norm.weight": mx.zeros(64)}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def test_networks_of_an_engine(model, tmp_path):
    memo = tmp_path / "memo.json"
    found = weights_digest.of_networks(configure(str(model)), memo)
    content = (model / "model.safetensors").read_bytes()
    assert found == {"target": expected({"model.safetensors": content})}
    lookup = {"method": "ngram", "num_speculative_tokens": 2}
    config = configure(str(model), speculative_config=lookup)
    assert weights_digest.of_networks(config, memo) == found
    drafting = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    config = configure(str(model), speculative_config=drafting)
    assert weights_digest.of_networks(config, memo) == found | {"draft": found["target"]}
    config = configure(str(model))
    (model / "leftover.safetensors").write_bytes(b"stray")
    assert weights_digest.of_networks(config, memo) == found


def test_code_and_quantization_of_the_folder_count(model):
    seen = []
    for trust in (False, True):
        config = configure(str(model), trust_remote_code=trust)
        for name in ("hf_quant_config.json", "custom.py"):
            for content in ("{}", "{ }"):
                (model / name).write_text(content)
                seen.append(weights_digest.of_networks(config, None)["target"])
    assert seen[0] != seen[1] == seen[2] == seen[3]  # code that may not run has no part
    assert len(set(seen[4:])) == 3 and seen[5] == seen[7]


def test_ids_of_ngrams_count_where_they_are_hashed(model):
    """From the published map, or from the tokenizer without one."""
    for hashed in (False, True):
        config = configure(str(model), hf_overrides={"engram_layer_ids": [1] if hashed else []})
        seen = []
        for name in ("tokenizer.json", "engram_token_map.json", "tokenizer.json"):
            for content in ("[0]", "[1]"):
                (model / name).write_text(content)
                seen.append(weights_digest.of_networks(config, None)["target"])
        assert len(set(seen)) == (4 if hashed else 1) and seen[3] == seen[4]
        (model / "engram_token_map.json").unlink()
        (model / "tokenizer.json").unlink()
