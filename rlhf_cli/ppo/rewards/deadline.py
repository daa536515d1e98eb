"""One deadline over a whole HTTP answer: connection, headers and body. http.client's timeout is of each read alone."""

import io
import socket
import time
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.request import HTTPHandler, HTTPSHandler


class _Until:
    """Mixed into a connection: its `timeout` counts from the start to the body's last byte.

    The system's look-up of a name has a limit of its own.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._end = time.monotonic() + self.timeout  # type: ignore[attr-defined]  # the connection's
        self.response_class = partial(_Answer, left=self._left)
        self._create_connection = self._dial  # http.client's place to put another one

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        self.sock.settimeout(self._left())  # type: ignore[attr-defined]

    def _left(self) -> float:
        """Seconds, more than 0. Raises TimeoutError."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left

    def _dial(self, address: tuple[str, int], timeout: float, source: Any) -> socket.socket:
        """A connection to the first of the name's addresses that takes one; all of them share the time."""
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        *others, last = [(str(target[0]), int(target[1])) for *_, target in found]
        for one in others:
            try:
                return socket.create_connection(one, self._left() / 2, source)
            except OSError:
                continue
        return socket.create_connection(last, self._left(), source)


class _Answer(HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, left: Callable[[], float], **options: Any) -> None:
        super().__init__(sock, *args, **options)
        assert isinstance(self.fp, io.BufferedReader)
        self.fp = io.BufferedReader(_Reads(self.fp.detach(), sock, left))


class _Reads(io.RawIOBase):
    """What comes from a socket; each read may take what is left of the time."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, left: Callable[[], float]) -> None:
        self._raw, self._sock, self._left = raw, sock, left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._left())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Plain(_Until, HTTPConnection):  # type: ignore[misc]
    pass


class _Secure(_Until, HTTPSConnection):  # type: ignore[misc]
    pass


class PlainHandler(HTTPHandler):
    def http_open(self, request: Any) -> Any:
        return self.do_open(_Plain, request)


class SecureHandler(HTTPSHandler):
    def https_open(self, request: Any) -> Any:
        return self.do_open(_Secure, request)
