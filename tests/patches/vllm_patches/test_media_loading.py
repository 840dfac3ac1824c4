# SPDX-License-Identifier: Apache-2.0
"""Limits of images, fetched media, and errors for bad ones."""

import asyncio
import base64
import gc
import io

import pytest
from PIL import Image
from vllm.exceptions import VLLMClientError
from vllm.multimodal.media.connector import MediaConnector
from vllm.multimodal.media.image import ImageMediaIO

from vllm_metal.patches.vllm_patches import media_loading
from vllm_metal.patches.vllm_patches.media_loading import LEAST_PIXELS, ImageMemory


def url(width=8, height=8, more=0):
    written = io.BytesIO()
    Image.new("P", (width, height)).save(written, "PNG")
    written.write(bytes(more))
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


@pytest.fixture
def bounded(monkeypatch):
    """Limits a request to two minimal images."""
    memory = ImageMemory(2 * LEAST_PIXELS)
    monkeypatch.setattr(media_loading, "MEMORY", memory)
    media_loading.bound(2 * LEAST_PIXELS, fetch_any_host=True)
    yield memory
    media_loading.bound(2**28, fetch_any_host=True)


async def load(*urls):
    """Loads one request's images, with an immediate answer."""
    connector = MediaConnector()
    with media_loading.MEMORY.request():
        return await asyncio.gather(*(connector.fetch_image_async(each) for each in urls))


def test_pixels_of_a_request_are_added_up_before_any_is_decoded(bounded, monkeypatch):
    assert [image.size for image in asyncio.run(load(url(), url(9)))] == [(8, 8), (9, 8)]
    decoded = []
    decode = ImageMediaIO.load_bytes
    monkeypatch.setattr(
        ImageMediaIO, "load_bytes", lambda self, data: decoded.append(data) or decode(self, data)
    )
    for urls in ([url()] * 3, [url(1500, 1500)], [url(more=9 * LEAST_PIXELS)]):
        decoded.clear()
        with pytest.raises(VLLMClientError, match="max_body_pixels"):
            asyncio.run(load(*urls))
        assert len(decoded) <= 2
    with pytest.raises(VLLMClientError, match="max_body_pixels"), bounded.request():
        for _ in range(3):  # as pooling routes load them, in a thread
            MediaConnector().fetch_image(url())


def test_frames_of_a_video_are_images_too(bounded):
    def frames(count):
        frame = url().partition(",")[2]
        return "data:video/jpeg;base64," + ",".join([frame] * count)

    async def fetch(count):
        with bounded.request():
            found = await MediaConnector().fetch_video_async(frames(count))
        return len(found[0])

    assert asyncio.run(fetch(2)) == 2
    with pytest.raises(VLLMClientError, match="max_body_pixels"):
        asyncio.run(fetch(3))


def test_requests_wait_for_the_memory_of_others_and_none_for_ever(bounded):
    async def answer(served):
        with bounded.request():
            images = [await MediaConnector().fetch_image_async(url()) for _ in range(2)]
            end = asyncio.Event()
            await served.put(end)
            await end.wait()  # a client reads its answer
            del images

    async def play():
        served, held = asyncio.Queue(), []
        asked = [asyncio.create_task(answer(served)) for _ in range(3)]
        for _ in asked:
            end = await asyncio.wait_for(served.get(), 240)
            await asyncio.sleep(0.05)
            held.append((bounded.held, served.qsize()))
            end.set()
        await asyncio.gather(*asked)
        return held

    # Two images fit. The oldest request gets its second one beside another's first.
    held = asyncio.run(play())
    assert [others for _, others in held] == [0, 0, 0]
    assert max(pixels for pixels, _ in held) <= 3 * LEAST_PIXELS
    gc.collect()
    assert bounded.held == 0


def test_a_request_that_fails_holds_nothing(bounded):
    broken = (
        "data:image/png;base64,"
        + base64.b64encode(base64.b64decode(url(80, 80).partition(",")[2])[:60]).decode()
    )
    for bad in (broken, "data:image/png;base64,AAAA", "data:image/png;base64,!"):
        with pytest.raises(ValueError):
            asyncio.run(load(bad))
    gc.collect()
    assert bounded.held == 0


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("data:image/png,plain", "base64"),
        ("file:///etc/hostname", "--allowed-local-media-path"),
        ("http://127.0.0.1:1/a.png", "cannot be reached"),
    ],
)
def test_what_is_wrong_with_an_address_is_the_clients_to_know(bounded, address, said, monkeypatch):
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")
    with pytest.raises(VLLMClientError, match=said):
        asyncio.run(load(address))


def test_media_that_need_a_missing_package_are_the_clients_mistake(bounded, monkeypatch):
    def read(self, data):
        raise ImportError("no module", name="cv2")

    monkeypatch.setattr(ImageMediaIO, "load_bytes", read)
    with pytest.raises(VLLMClientError, match="package cv2 is not installed"):
        asyncio.run(load(url()))


def test_addresses_are_fetched_where_hosts_are_named(bounded):
    from urllib3.util import parse_url

    address = parse_url("http://h/a.png")
    MediaConnector()._assert_url_in_allowed_media_domains(address)
    media_loading.bound(2 * LEAST_PIXELS, fetch_any_host=False)
    MediaConnector(allowed_media_domains=["h"])._assert_url_in_allowed_media_domains(address)
    with pytest.raises(VLLMClientError, match="--allowed-media-domains"):
        MediaConnector()._assert_url_in_allowed_media_domains(address)
    assert _asked_to_redirect() is False
    media_loading.bound(2 * LEAST_PIXELS, fetch_any_host=True)
    assert _asked_to_redirect() is True


def _asked_to_redirect():
    from vllm.connections import HTTPConnection

    class Client:
        def get(self, url, **options):
            return options["allow_redirects"]

    connection = HTTPConnection()
    connection.get_sync_client = lambda: Client()
    return connection.get_response("http://h/a.png", allow_redirects=True)
