# SPDX-License-Identifier: Apache-2.0
"""Who may be served from what is on disk: the same set-up again, however the process before ended,
and nobody else."""

import json
import logging
import os
import shutil
import signal
import time
from contextlib import contextmanager, suppress

import mlx.core as mx
import pytest
from e2e.disk import HITS, LOADED, ask, check_same, disk_engine, disk_hits, pages, random_prompts
from e2e.fuzz.models import VOCAB
from e2e.harness import counters, run_out, text_tokens
from e2e.server import serve
from e2e.test_failures import engine_core

from vllm_metal.identity import facts
from vllm_metal.settings import salts, secret_file


@contextmanager
def said():
    """Log messages about unusable pages."""
    lines, logger = [], logging.getLogger("vllm_metal.kv_transfer.disk.store")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def scale(weights, factor):
    """Changes a checkpoint file without changing its size."""
    file = weights / "model.safetensors"
    arrays = mx.load(str(file))
    arrays = {name: array * factor if "k_proj" in name else array for name, array in arrays.items()}
    mx.eval(list(arrays.values()))
    mx.save_safetensors(str(file), arrays, {"format": "mlx"})


@pytest.fixture
def own(tiny_models, tmp_path):
    """A folder with a model and a draft that a test may change."""
    for name in ("full", "full-draft"):
        shutil.copytree(tiny_models / name, tmp_path / name)
    return tmp_path


def draft_options(own):
    return {
        "speculative_config": {
            "method": "draft_model",
            "model": str(own / "full-draft"),
            "num_speculative_tokens": 2,
        }
    }


def rope(factor):
    return {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": factor}}}


CHANGES = {
    "weights": (lambda own, patch: scale(own / "full", 1.5) or {}, "weights of the"),
    "draft": (lambda own, patch: scale(own / "full-draft", 1.5) or draft_options(own), "draft"),
    "no draft": (lambda own, patch: {"speculative_config": None}, "draft"),
    "fp8": (lambda own, patch: {"kv_cache_dtype": "fp8"}, "kv_cache_dtype float32, now fp8"),
    "rope": (lambda own, patch: rope(5e5), "rope changed"),
    "sources": (
        lambda own, patch: patch.setattr(facts, "sources", lambda _: "0" * 32) or {},
        "vllm_metal changed",
    ),
    "blocks": (lambda own, patch: {"block_size": 32}, "block_size 16, now 32"),
}


@pytest.mark.more
def test_nothing_is_found_for_another_set_up(own, monkeypatch):
    cache, model = own / "cache", str(own / "full")
    prompts = random_prompts([100], VOCAB)
    kept = [own / "full", own / "full-draft"]
    for folder in kept:
        shutil.copytree(folder, folder.with_name(folder.name + "-kept"))
    with disk_engine(model, cache, **draft_options(own)) as llm:
        answers = ask(llm, prompts)
        run_out(llm)
    for name, (change, reason) in CHANGES.items():
        copy = shutil.copytree(cache, own / f"cache-{name}")  # or the next change is from this one
        with monkeypatch.context() as patch:
            options = draft_options(own) | change(own, patch)
            with said() as lines, disk_engine(model, copy, **options) as llm:
                ask(llm, prompts)
                assert disk_hits(llm) == 0, name
            assert len(lines) == 1 and reason in lines[0], (name, lines)
        for folder in kept:  # changed back; what the other set-up has stored may go
            shutil.rmtree(folder)
            shutil.copytree(folder.with_name(folder.name + "-kept"), folder)
    with said() as lines, disk_engine(model, cache, **draft_options(own)) as llm:
        check_same(ask(llm, prompts), answers)
        assert disk_hits(llm) == 96
        assert not lines


@pytest.mark.more
def test_weights_that_change_while_an_engine_runs(own):
    prompts, model = random_prompts([100], VOCAB), str(own / "full")
    with disk_engine(model, own / "cache", enable_sleep_mode=True) as llm:
        before = ask(llm, prompts)
        run_out(llm)
        scale(own / "full", 1.5)
        llm.sleep(2)
        llm.wake_up(["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(["kv_cache"])
        after = ask(llm, prompts)
        run_out(llm)
        assert disk_hits(llm) == 0
        assert after[0].logprobs != pytest.approx(before[0].logprobs, abs=1e-4)
        assert llm.reset_prefix_cache()
        check_same(ask(llm, prompts), after)
        assert disk_hits(llm) == 96
    with disk_engine(model, own / "cache") as llm:
        check_same(ask(llm, prompts), after)
        assert disk_hits(llm) == 96


def test_salts(tiny, tmp_path):
    secret = tmp_path / "key"
    secret.write_text("0123456789abcdef" * 2)
    secret.chmod(0o600)
    key, cache = secret_file.read(secret, "secret"), tmp_path / "cache"
    (prompt,) = random_prompts([100], VOCAB)
    ours, theirs = salts.derive(key, "ours"), salts.derive(key, "theirs")
    forged = f"{ours[:-1]}{'0' if ours[-1] != '0' else '1'}"
    with disk_engine(tiny, cache, salt_key=secret) as llm:

        def local_hits():
            return counters(llm)["vllm:prefix_cache_hits"]

        first = ask(llm, [prompt], salt="a client's own")
        for salt in ("another's", forged, ours, theirs, None):
            check_same(ask(llm, [prompt], salt=salt), first)
            assert (local_hits(), disk_hits(llm)) == (0, 0), salt
            run_out(llm)
        check_same(ask(llm, [prompt], salt="a client's own"), first)
        assert local_hits() == 96
    folders = {path.parents[1].name for path in pages(cache)}
    assert folders == {"shared", *(salts.namespace(key, salt) for salt in (ours, theirs))}
    assert len(folders) == 3
    assert len(pages(cache)) == 3 * 6
    with disk_engine(tiny, cache, salt_key=secret) as llm:
        expected = 0
        for salt, hit in [
            ("a client's own", 0),
            (forged, 0),
            (salts.derive(key, "a third"), 0),
            (salts.derive(key, "ours", "a client's own"), 0),
            (ours, 96),
            (None, 96),
        ]:
            check_same(ask(llm, [prompt], salt=salt), first)
            expected += hit
            assert disk_hits(llm) == expected, salt
    with disk_engine(tiny, cache) as llm:  # without the key nobody is known
        check_same(ask(llm, [prompt], salt=ours), first)
        assert disk_hits(llm) == 0


def complete(client, prompt, max_tokens=16):
    """Returns tokens and log-probabilities of a completion, and its seconds to first token."""
    started = time.monotonic()
    first, tokens, logprobs = None, [], []
    for chunk in client.completions.create(
        model=client.models.list().data[0].id,
        prompt=prompt,
        temperature=0,
        max_tokens=max_tokens,
        logprobs=0,
        stream=True,
        extra_body={"ignore_eos": True},
    ):
        first = first or time.monotonic() - started
        tokens += chunk.choices[0].logprobs.tokens
        logprobs += chunk.choices[0].logprobs.token_logprobs
    return tokens, logprobs, first


def wait_until_stored(server, cache, number):
    deadline = time.monotonic() + 60
    while len(pages(cache)) < number:
        assert time.monotonic() < deadline, f"{len(pages(cache))} pages of {number}"
        time.sleep(0.1)


@pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.more)])
def test_weights_whose_files_change_are_those_that_were_loaded(own, tmp_path, level):
    """A pool made later, after sleep or a failed step, does not depend on the files."""
    model, cache = own / "full", tmp_path / "cache"
    (prompt,) = random_prompts([100], VOCAB)
    with disk_engine(str(model), cache, enable_sleep_mode=True) as llm:
        scale(model, 1.5)
        llm.sleep(level)
        llm.wake_up()
        (before,) = ask(llm, [prompt])
        run_out(llm)
    with disk_engine(str(model), cache) as llm:
        (after,) = ask(llm, [prompt])
        assert after.cached == (0 if level == 1 else 96)
        assert (after.tokens == before.tokens) == (level == 2)


@pytest.mark.slow
def test_a_long_prompt_of_a_real_model(smollm2, tmp_path):
    text = text_tokens(smollm2)
    prompt = (text * (4000 // len(text) + 1))[:4000]
    check_restart(smollm2, tmp_path, prompt, "killed", 4096)


@pytest.mark.slow
def test_a_very_long_prompt(tiny_models, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_models / "full", model)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 33_000
    (model / "config.json").write_text(json.dumps(config))
    (prompt,) = random_prompts([32_000], VOCAB)
    check_restart(str(model), tmp_path, prompt, "stopped", 33_000)


def check_restart(model, tmp_path, prompt, ending, max_model_len):
    """Checks that a prompt's whole blocks come from disk, and the answer is unchanged."""
    cache = tmp_path / "cache"
    config = {"prefix_cache_dir": str(cache), "prefix_cache_bytes": 4 << 30}
    options = [
        *("--max-model-len", str(max_model_len)),
        *("--kv-cache-memory-bytes", str(1 << 30)),
        *("--additional-config", json.dumps(config)),
    ]
    warm_up = prompt[100:110]
    with serve(model, options, tmp_path / "first") as server, server.client() as client:
        complete(client, warm_up)
        cold = complete(client, prompt)
        wait_until_stored(server, cache, len(prompt) // 16)
        if ending == "killed":
            engine = engine_core(server)
            for process in [server.process, engine]:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
    with serve(model, options, tmp_path / "second") as server, server.client() as client:
        complete(client, warm_up)
        warm = complete(client, prompt)
        assert server.metric(f"{HITS}_total") == len(prompt) // 16 * 16
        assert server.metric(f"{LOADED}_total") > 0
    assert warm[0] == cold[0]
    assert warm[1] == pytest.approx(cold[1], abs=1e-3)
    print(f"first token after {cold[2]:.3f} s, and {warm[2]:.3f} s after the restart")
