# SPDX-License-Identifier: Apache-2.0
"""A server that reads images: answers, and what it must not fetch, open or log."""

import base64
import dataclasses
import http.server
import io
import json
import os
import struct
import subprocess
import sys
import threading
import zlib
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import openai
import psutil
import pytest
from e2e.harness import counters, engine, greedy
from e2e.server import serve
from e2e.tenants import write_settings
from engine.vision import reference
from engine.vision.checkpoints import FAMILIES
from PIL import Image

pytestmark = pytest.mark.more
FAMILY = FAMILIES["qwen3_vl"]
QUESTION = "What do you see?"


def picture(width=100, height=150, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image, kind="PNG", **options):
    written = io.BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


def data_url(content, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


@contextmanager
def files(content):
    """Serves `content` by path, or redirects to a path in it; counts requests."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            found = content[self.path]
            self.send_response(302 if isinstance(found, str) else 200)
            if isinstance(found, str):
                self.send_header("Location", found)
            body = found if isinstance(found, bytes) else b""
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return FAMILY.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def readable(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readable")
    (folder / "picture.png").write_bytes(encoded(picture(seed=1)))
    return folder


@pytest.fixture(scope="module")
def server(checkpoint, readable, tmp_path_factory):
    options = (
        *("--served-model-name", "toy"),
        *("--max-model-len", "512"),
        *("--kv-cache-memory-bytes", str(64 << 20)),
        *("--limit-mm-per-prompt", '{"image": 2}'),
        *("--allowed-local-media-path", str(readable)),
        *("--allowed-media-domains", "127.0.0.1"),
    )
    unredirected = {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0", "VLLM_MEDIA_FETCH_MAX_RETRIES": "1"}
    log = tmp_path_factory.mktemp("server") / "log"
    with serve(checkpoint, options, log, environment=unredirected) as started:
        yield started


@pytest.fixture(scope="module")
def client(server):
    with server.client() as connected:
        yield connected


def ask(client, *urls, **options):
    """Returns a greedy chat answer about images."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    message = {"role": "user", "content": [*images, {"type": "text", "text": QUESTION}]}
    more = {"ignore_eos": True, "return_token_ids": True}
    settings = {"temperature": 0, "max_tokens": 8, "extra_body": more}
    return client.chat.completions.create(model="toy", messages=[message], **(settings | options))


def tokens(client, *urls):
    """Returns the tokens of the prompt and of the answer."""
    answer = ask(client, *urls)
    return answer.prompt_token_ids, answer.choices[0].token_ids


def test_answers_are_those_of_transformers(server, client, checkpoint):
    images = [picture(), picture(90, 200, seed=2)]
    urls = [data_url(encoded(image)) for image in images]
    hits = server.metric("vllm:prefix_cache_hits_total")
    first, again = tokens(client, *urls), tokens(client, *urls)
    assert first == again == reference.answer(checkpoint, FAMILY, images, QUESTION, count=8)
    assert server.metric("vllm:prefix_cache_hits_total") - hits >= 48
    assert server.metric("vllm:mm_cache_hits_total") >= 2
    others = reference.answer(checkpoint, FAMILY, images[::-1], QUESTION, count=8)
    assert tokens(client, *reversed(urls)) == others


def test_images_come_from_where_the_options_allow(client, readable):
    content = encoded(picture(seed=1))
    expected = tokens(client, data_url(content))
    assert tokens(client, f"file://{readable}/picture.png") == expected
    with files({"/picture.png": content}) as (address, asked):
        assert tokens(client, f"{address}/picture.png") == expected
        assert asked == ["/picture.png"]


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/hostname",
        "file://{readable}/../secret.png",
        "http://localhost:{port}/picture.png",
        "ftp://127.0.0.1/x",
    ],
)
def test_nothing_else_is_fetched(client, readable, url):
    with files({"/picture.png": encoded(picture())}) as (address, asked):
        url = url.format(readable=readable, port=address.rpartition(":")[2])
        with pytest.raises(openai.BadRequestError):
            ask(client, url)
        assert asked == []


def test_redirections_are_not_followed(client):
    with files({"/a": "/picture.png", "/picture.png": encoded(picture())}) as (address, asked):
        with pytest.raises(openai.BadRequestError):
            ask(client, f"{address}/a")
        assert asked == ["/a"]


def zeros(width, height):
    """Makes a file that claims this many pixels and has none."""

    def chunk(name, data):
        checked = name + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def _truncated():
    whole = encoded(picture())
    return whole[: len(whole) // 2]


BAD = {
    "truncated": _truncated(),
    "no image": b"GIF89a and then nothing of it",
    "empty": b"",
    "0 pixels": zeros(0, 0),
    "0 rows": zeros(10, 0),
    "a bomb": zeros(60_000, 60_000),
    "a small bomb": encoded(Image.new("1", (9000, 9000))),
    "a line": encoded(picture(4000, 4)),
    "too wide": encoded(picture(60_000, 1)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_fails_its_own_request_alone(server, client, name):
    with pytest.raises(openai.BadRequestError):
        ask(client, data_url(BAD[name]))
    assert server.health() == 200


def test_the_server_still_answers_and_wrote_nothing_down(server, client):
    content = data_url(encoded(picture()))
    tokens(client, content)
    log = server.log.read_text()
    assert content[40:100] not in log
    assert "Traceback" not in log


def test_limits_and_other_media_are_named(client):
    url = data_url(encoded(picture()))
    with pytest.raises(openai.BadRequestError, match="At most 2 image"):
        ask(client, url, url, url)
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    with pytest.raises(openai.BadRequestError, match="audio"):
        client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": [sound]}], max_tokens=1
        )


@pytest.fixture(scope="module")
def tenants(checkpoint, tmp_path_factory):
    """A server with tenants, and a function that sends a tenant's request."""
    folder = tmp_path_factory.mktemp("tenants")
    keys = write_settings(folder)
    options = (
        *("--served-model-name", "toy"),
        *("--max-model-len", "512"),
        *("--kv-cache-memory-bytes", str(64 << 20)),
        *("--middleware", "vllm_metal.serving.Tenants"),
    )
    settings = {"VLLM_METAL_SERVING_CONFIG": str(folder / "serving.toml")}
    with (
        serve(checkpoint, options, folder / "log", environment=settings) as server,
        httpx.Client(timeout=120, base_url=server.url) as connected,
    ):

        def send(tenant, path, body):
            key = {"Authorization": f"Bearer {keys[tenant]}"}
            return connected.post(path, json={"model": "toy", **body}, headers=key)

        yield dataclasses.replace(server, metrics_key=keys["metrics"]), send


def seen(*urls, **more):
    parts = [{"type": "image_url", "image_url": {"url": url}, **more} for url in urls]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}
    return {"messages": [message], "temperature": 0, "max_tokens": 2}


def test_a_tenant_finds_no_image_of_another(tenants):
    server, send = tenants
    body = seen(data_url(encoded(picture(seed=7))))
    hits = server.metric("vllm:mm_cache_hits_total")
    assert send("acme", "/v1/chat/completions", body).status_code == 200
    # In requests to whose keys a prompt is rendered, or counted, too.
    assert send("other", "/tokenize", body).status_code == 200
    assert send("other", "/v1/chat/completions", body).status_code == 200
    assert server.metric("vllm:mm_cache_hits_total") == hits
    assert send("acme", "/v1/chat/completions", body | {"max_tokens": 3}).status_code == 200
    assert server.metric("vllm:mm_cache_hits_total") > hits
    named = {"type": "input_image", "image_url": None, "uuid": "SECRET"}
    output = {"type": "function_call_output", "call_id": "c", "output": [named]}
    reply = send("other", "/v1/responses", {"input": [output]})
    assert reply.status_code == 400 and "uuid" in reply.text


def test_a_request_takes_what_it_may_and_no_more(tenants):
    """A body of a few kB would take gigabytes, or block the server for seconds."""
    server, send = tenants
    large = data_url(encoded(Image.new("P", (8192, 8192))))
    rules = "".join(f'r{n} ::= r{n + 1} "a" | "b"\n' for n in range(5000))
    grammar = {"structured_outputs": {"grammar": f'root ::= r0\n{rules}r5000 ::= "c"'}}
    before = _resident(server)
    for body, setting in (
        (seen(*[large] * 8), "max_body_pixels"),
        (seen(*[data_url(encoded(picture(2, 2)))] * 200), "max_body_pixels"),
        ({"messages": [{"role": "user", "content": "a"}], **grammar}, "max_body_grammar"),
    ):
        spent = _spent_s(server)
        reply = send("acme", "/v1/chat/completions", body)
        assert reply.status_code == 400 and setting in reply.text
        assert _spent_s(server) - spent < 5
    assert _resident(server) - before < 1.5e9


def test_a_tenant_names_no_addresses(tenants):
    server, send = tenants
    with files({"/picture.png": encoded(picture())}) as (address, asked):
        url = f"{address}/picture.png?signature=of-a-client"
        for path in ("/v1/chat/completions", "/tokenize"):
            reply = send("acme", path, seen(url))
            assert reply.status_code == 400 and "--allowed-media-domains" in reply.text
        assert asked == []
    for url in ("file:///etc/hostname", "data:image/png,plain"):
        assert send("acme", "/v1/chat/completions", seen(url)).status_code == 400
    assert "of-a-client" not in server.log.read_text()


def _spent_s(server):
    """Returns the CPU seconds of the server's own process."""
    return sum(psutil.Process(server.process.pid).cpu_times()[:2])


def _resident(server):
    """Returns the bytes of the server and its descendants."""
    process = psutil.Process(server.process.pid)
    return sum(each.memory_info().rss for each in [process, *process.children(recursive=True)])


@pytest.mark.slow
def test_the_example_asks_about_a_picture(server, readable):
    example = Path(__file__).parents[2] / "examples" / "images.py"
    command = (str(example), "--server", server.url, "--max-tokens", "8")
    done = subprocess.run(
        [sys.executable, *command, str(readable / "picture.png"), QUESTION],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_vllms_benchmark_of_random_images_runs(server, checkpoint, tmp_path):
    command = (
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *("--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--base-url", server.url, "--model", "toy", "--tokenizer", checkpoint),
        *("--dataset-name", "random-mm", "--num-prompts", "4"),
        *("--random-input-len", "20", "--random-output-len", "4"),
        *("--random-mm-base-items-per-request", "1"),
        *("--random-mm-limit-mm-per-prompt", '{"image": 1, "video": 0}'),
        *("--random-mm-bucket-config", "{(64, 96, 1): 1.0}"),
        *("--save-result", "--result-dir", str(tmp_path)),
    )
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = tmp_path.glob("*.json")
    told = json.loads(result.read_text())
    assert (told["completed"], told["failed"]) == (4, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_answers_about_frames_of_a_video_are_those_of_transformers(name, tmp_path):
    family = FAMILIES[name]
    folder = family.write(tmp_path)
    frames = np.random.default_rng(3).integers(0, 255, (6, 100, 150, 3), dtype=np.uint8)
    told = {"fps": 2.0, "duration": 3.0, "total_num_frames": 6, "frames_indices": [*range(6)]}
    prompt = f"{family.video} and {family.image} {QUESTION}"
    media = {"video": [(frames, told | {"do_sample_frames": False})], "image": [picture()]}
    with engine(folder, max_model_len=512) as llm:
        (output,) = llm.generate(
            {"prompt": prompt, "multi_modal_data": media}, greedy(8), use_tqdm=False
        )
        assert counters(llm)["vllm:mm_cache_queries"] == 2
    expected = reference.generated(
        folder, family, prompt, media["image"], 8, videos=[frames], video_metadata=[told]
    )
    assert (output.prompt_token_ids, [*output.outputs[0].token_ids]) == expected


TEXT_ALONE = """
import sys
from vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], max_model_len=256, kv_cache_memory_bytes=2**24, language_model_only=True)
(output,) = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
loaded = [name for name in sys.modules if name.startswith(
    ("mlx_vlm", "vllm_metal.engine.vision", "vllm.model_executor.models.qwen", "torchvision"))]
print("LOADED", loaded, list(output.outputs[0].token_ids))
"""


@pytest.mark.slow
def test_text_alone_loads_nothing_of_images(checkpoint):
    done = subprocess.run(
        [sys.executable, "-c", TEXT_ALONE, checkpoint],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _, expected = reference.generated(checkpoint, FAMILY, "Hello", [], 8)
    assert done.stdout.splitlines()[-1] == f"LOADED [] {expected}"
