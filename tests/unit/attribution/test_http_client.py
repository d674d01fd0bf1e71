"""Where a token may come from, and replies that are compressed although the request forbids it."""

from __future__ import annotations

import gzip
import os
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from nvrx_slurm.attribution.http_client import (
    LONGEST_REPLY_BYTES,
    HttpClient,
    HttpReply,
    PermanentError,
    RetryableError,
    token_of,
)
from nvrx_slurm.errors import ConfigError

KEY = "fault_tolerance.attribution.slack.token_file"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("xoxb-1\n")
    path.chmod(0o600)
    return path


def test_a_file_comes_before_the_environment(file: Path) -> None:
    """The line end of the file is no part of the token."""
    assert token_of(str(file), "xoxb-2", key=KEY) == "xoxb-1"
    assert token_of(None, " xoxb-2", key=KEY) == "xoxb-2"
    assert token_of(None, None, key=KEY) is None


def test_a_file_is_read_each_time(file: Path) -> None:
    """A token may be replaced while a job runs for weeks."""
    token_of(str(file), None, key=KEY)
    file.write_text("xoxb-3")
    assert token_of(str(file), None, key=KEY) == "xoxb-3"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620])
def test_a_file_that_others_can_open_is_refused(file: Path, mode: int) -> None:
    """The error names the file, its mode and the command that mends it."""
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode 0{mode:o}.*chmod 600") as caught:
        token_of(str(file), "xoxb-2", key=KEY)
    assert (caught.value.file, caught.value.key) == (str(file), KEY)
    assert "xoxb" not in str(caught.value)


@pytest.mark.parametrize("content", ["", " \n", "two\nlines", "tükén", "a\x00b", "x" * 9000])
def test_a_file_that_holds_no_token_is_refused(file: Path, content: str) -> None:
    """The content is not shown: it may be half of a token."""
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        token_of(str(file), None, key=KEY)
    assert (caught.value.file, caught.value.key) == (str(file), KEY)
    assert not content.strip() or content not in str(caught.value)


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    """A folder is refused, and so is a missing file."""
    for place in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError) as caught:
            token_of(str(place), None, key=KEY)
        assert (caught.value.file, caught.value.key) == (str(place), KEY)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """A FIFO may never get a writer, so it is refused at once."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError):
        token_of(str(tmp_path / "pipe"), None, key=KEY)


ANSWER = b'{"state": "done"}'


class Packing(HTTPServer):
    """Replies with `body`, and says that it is encoded as `coding`."""

    coding, body = "", b""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Packing

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Encoding", self.server.coding)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: object) -> None:
        """Print nothing in the test's output."""


@pytest.fixture
def packing() -> Iterator[Packing]:
    """A server on a port of its own."""
    server = Packing(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


async def reply_of(server: Packing, coding: str, body: bytes) -> HttpReply:
    """The reply that the client makes of this body."""
    server.coding, server.body = coding, body
    client = HttpClient(proxies=False)
    try:
        return await client.send("GET", f"http://127.0.0.1:{server.server_port}/", connect_s=30.0, read_s=30.0)
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("identity", ANSWER),
        ("gzip", gzip.compress(ANSWER, mtime=0)),
        ("X-GZip", gzip.compress(ANSWER, mtime=0)),
        ("deflate", zlib.compress(ANSWER)),
    ],
)
async def test_a_compressed_reply_is_read(packing: Packing, coding: str, body: bytes) -> None:
    """A proxy may compress although the request says that it must not."""
    assert (await reply_of(packing, coding, body)).body == ANSWER


@pytest.mark.parametrize(
    ("coding", "body"),
    [("br", ANSWER), ("gzip, gzip", gzip.compress(gzip.compress(ANSWER, mtime=0), mtime=0)), ("gzip", ANSWER)],
)
async def test_another_coding_is_refused(packing: Packing, coding: str, body: bytes) -> None:
    """The body is refused, and not read as if it were text."""
    with pytest.raises(PermanentError):
        await reply_of(packing, coding, body)


async def test_a_compressed_reply_is_bounded(packing: Packing) -> None:
    """A small body that unpacks to more than the limit of a plain reply is refused; one of exactly that size is
    read."""
    assert (
        len((await reply_of(packing, "gzip", gzip.compress(bytes(LONGEST_REPLY_BYTES)))).body) == LONGEST_REPLY_BYTES
    )
    with pytest.raises(PermanentError):
        await reply_of(packing, "gzip", gzip.compress(bytes(LONGEST_REPLY_BYTES + 1)))


async def test_a_torn_compressed_reply_may_be_asked_for_again(packing: Packing) -> None:
    """A body that is cut off is a retryable error."""
    with pytest.raises(RetryableError):
        await reply_of(packing, "gzip", gzip.compress(ANSWER)[:-6])
