# SPDX-License-Identifier: Apache-2.0
"""Bounds the memory of a request's images, and the hosts that a server fetches them from.

vLLM bounds the pixels of one image. It decodes and processes all images of a request before it
counts tokens, so a body of some kilobytes can take gigabytes.
"""

# Remove when vLLM limits the images of a request, and of all requests. Read against vLLM 0.33.

from __future__ import annotations

import asyncio
import io
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from vllm_metal.patches.vllm_patches.replacing import replace

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

#: Pixels that an image counts as at least: models enlarge small images first.
LEAST_PIXELS = 2**20
#: Bytes of a file that count as one pixel: the size of a decoded pixel.
_BYTES_OF_A_PIXEL = 4
#: Files that one request fetches at a time, each up to VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB.
_FETCHES_AT_ONCE = 4


class _Request:
    def __init__(self) -> None:
        self.pixels = 0  # pixels of all its images so far
        self.held = 0  # pixels of decoded images that are still in memory
        self.open = True  # whether its client still waits for an answer
        self.fetches = asyncio.Semaphore(_FETCHES_AT_ONCE)


class ImageMemory:
    """Limits the pixels of a server's decoded images; more images wait until some are freed."""

    def __init__(self, per_request: int) -> None:
        """
        Args:
            per_request: most pixels of one request's images. All requests together may have as
                many; only the one that has waited longest may go beyond that.
        """
        self.per_request = per_request
        self.held = 0  # pixels of images that are decoded and not yet garbage
        self._lock = Lock()
        self._requests: dict[_Request, None] = {}  # requests that hold images or wait, oldest first
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts images loaded within the block, and in its tasks, as one request's."""
        made = _Request()
        before = _REQUEST.set(made)
        try:
            yield
        finally:
            _REQUEST.reset(before)
            with self._lock:
                made.open = False
                self._requests.pop(made, None)
            self._notify()

    def charge(self, pixels: int, num_bytes: int) -> int:
        """Adds an image of `num_bytes` to this task's request before it is decoded.

        `pixels` is the number in the image's header. Returns the number to count, which is larger
        for small images and large files.

        Raises VLLMValidationError: the request's images have too many pixels.
        """
        from vllm.exceptions import VLLMValidationError

        pixels = max(pixels, num_bytes // _BYTES_OF_A_PIXEL, LEAST_PIXELS)
        if (request := _REQUEST.get()) is None:
            return pixels
        with self._lock:
            request.pixels += pixels
            total = request.pixels
        if total > self.per_request:
            raise VLLMValidationError(
                f"The images of the request have more than {self.per_request} pixels in total "
                f"(max_body_pixels), where each counts as at least {LEAST_PIXELS}. Send fewer or "
                "smaller images."
            )
        return pixels

    async def wait_for(self, pixels: int) -> None:
        """Waits until an image may be decoded, and adds it to the decoded images.

        `pixels` is the result of `charge`.
        """
        # The oldest request never waits, so requests cannot deadlock waiting for each other.
        request = _REQUEST.get()
        if request is None:
            return
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                if request.open:
                    self._requests.setdefault(request)
                oldest = next(iter(self._requests), request) is request
                if oldest or self.held + pixels <= self.per_request:
                    self.held += pixels
                    request.held += pixels
                    return
                changed = loop.create_future()
                self._waiting.append((loop, changed))
            await changed

    def hold(self, image: Any, pixels: int) -> None:
        """Counts an image of this task's request until nothing refers to it."""
        if (request := _REQUEST.get()) is not None:
            weakref.finalize(image, self._release, request, pixels).atexit = False

    def release(self, pixels: int) -> None:
        """Stops counting an image of this task's request."""
        if (request := _REQUEST.get()) is not None:
            self._release(request, pixels)

    def _release(self, request: _Request, pixels: int) -> None:
        # Finalizers call this in any thread.
        with self._lock:
            self.held -= pixels
            request.held -= pixels
            if not request.held:
                self._requests.pop(request, None)
        self._notify()

    def _notify(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for loop, changed in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_set, changed)


def _set(changed: asyncio.Future[None]) -> None:
    if not changed.done():
        changed.set_result(None)


_REQUEST: ContextVar[_Request | None] = ContextVar("request_images", default=None)
MEMORY = ImageMemory(2**28)
_FETCHES = [True]  # whether URLs of any host are fetched; a list, so that `bound` can set it


class CountImages:
    """ASGI middleware that counts images per request, for their memory limit."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        with MEMORY.request():
            await self.app(scope, receive, send)


def around(app: ASGIApp, state: Any) -> ASGIApp:
    """Wraps an application so that the images of each request are counted."""
    return CountImages(app)


def bound(per_request: int, fetch_any_host: bool) -> None:
    """Bounds the pixels of each request's images, and reports invalid images to the client.

    Without `fetch_any_host`, URLs are only fetched with `--allowed-media-domains`.
    """
    from vllm.connections import HTTPConnection
    from vllm.entrypoints.pooling.base.io_processor import PoolingIOProcessor
    from vllm.multimodal.media.connector import MediaConnector

    MEMORY.per_request, _FETCHES[0] = per_request, fetch_any_host
    replace(MediaConnector, "load_from_url", _load)
    replace(MediaConnector, "load_from_url_async", _load_async)
    replace(MediaConnector, "_assert_url_in_allowed_media_domains", _check_host)
    replace(PoolingIOProcessor, "render", _render)
    for name in ("get_response", "get_async_response"):
        replace(HTTPConnection, name, _without_redirections)


class _Encoded:
    """Replaces vLLM's image reader where a file's bytes are wanted."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def get_max_bytes(self) -> int | None:
        limit: int | None = self._reader.get_max_bytes()
        return limit

    def load_bytes(self, data: bytes) -> bytes:
        return data

    def load_base64(self, media_type: str, data: str) -> bytes:
        import pybase64

        return pybase64.b64decode(data, validate=True)

    def load_file(self, path: Path) -> bytes:
        return path.read_bytes()


class _CountedFrames:
    """Replaces vLLM's reader of video frames, which arrive as images one by one."""

    def __init__(self, reader: Any) -> None:
        self._reader, self._context = reader, copy_context()  # frames are read in another thread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def load_base64(self, media_type: str, data: str) -> Any:
        encoded = _Encoded(self._reader).load_base64(media_type, data)
        self._context.run(MEMORY.charge, _num_pixels(encoded), len(encoded))
        return self._reader.load_bytes(encoded)


def _count_frames(reader: Any) -> None:
    from vllm.multimodal.media.video import VideoMediaIO

    if isinstance(reader, VideoMediaIO):
        reader.image_io = _CountedFrames(reader.image_io)  # type: ignore[assignment]


def _is_image(reader: Any) -> bool:
    from vllm.multimodal.media.image import ImageMediaIO

    return isinstance(reader, ImageMediaIO)


def _num_pixels(encoded: bytes) -> int:
    """Returns the pixels that an image's header states, or 0 if vLLM will reject it."""
    from PIL import Image
    from vllm.multimodal.media import image

    try:
        with image.open_image(io.BytesIO(encoded)) as found:
            width, height = found.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return 0
    return int(width * height)


def _load(load: Callable[..., Any], connector: Any, url: str, reader: Any, **options: Any) -> Any:
    with _rejecting():
        if not _is_image(reader):
            _count_frames(reader)
            return load(connector, url, reader, **options)
        encoded = load(connector, url, _Encoded(reader), **options)
        MEMORY.charge(_num_pixels(encoded), len(encoded))
        return reader.load_bytes(encoded)


async def _load_async(
    load: Callable[..., Any], connector: Any, url: str, reader: Any, **options: Any
) -> Any:
    from vllm.multimodal.media import connector as media

    with _rejecting():
        if not _is_image(reader):
            _count_frames(reader)
            return await load(connector, url, reader, **options)
        request = _REQUEST.get()
        async with nullcontext() if request is None else request.fetches:
            encoded = await load(connector, url, _Encoded(reader), **options)
        run, pool = asyncio.get_running_loop().run_in_executor, media.global_thread_pool
        pixels = MEMORY.charge(await run(pool, _num_pixels, encoded), len(encoded))
        await MEMORY.wait_for(pixels)
        try:
            image = await run(pool, reader.load_bytes, encoded)
        except BaseException:
            MEMORY.release(pixels)
            raise
        MEMORY.hold(image.media, pixels)
        return image


@contextmanager
def _rejecting() -> Iterator[None]:
    """Answers 400 or 422 where vLLM would answer 5xx, which clients retry."""
    import aiohttp
    import requests
    from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError

    try:
        yield
    except (aiohttp.ClientConnectionError, requests.ConnectionError, TimeoutError) as error:
        raise VLLMUnprocessableEntityError("The address of an image cannot be reached.") from error
    except NotImplementedError as error:  # a data: URL
        raise VLLMValidationError(str(error)) from error
    except ImportError as error:
        raise VLLMValidationError(
            f"This server cannot read such media: the package {error.name} is not installed."
        ) from error
    except RuntimeError as error:
        if "--allowed-local-media-path" not in str(error):
            raise
        raise VLLMValidationError(str(error)) from error


def _check_host(check: Callable[..., None], connector: Any, url: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    if not connector.allowed_media_domains and not _FETCHES[0]:
        raise VLLMValidationError(
            "This server does not fetch URLs: send the image itself, as a data: URL, or "
            "start the server with --allowed-media-domains."
        )
    check(connector, url)


def _without_redirections(get: Callable[..., Any], *args: Any, **options: Any) -> Any:
    # If not all hosts may be fetched, a redirection must not lead to others.
    if not _FETCHES[0] and "VLLM_MEDIA_URL_ALLOW_REDIRECTS" not in os.environ:
        options["allow_redirects"] = False
    return get(*args, **options)


def _render(render: Callable[..., Any], *args: Any, **options: Any) -> Any:
    # vLLM calls this in a thread without the request's context, so it opens one of its own.
    with MEMORY.request():
        return render(*args, **options)
