"""HTTP as a load generator needs it: little work for each byte, and the moment at which every piece of an answer came.

Answers are read when they are complete: reading them as they come would delay the clock of all the others.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import httptools

from sparkrt.errors import SparkrtError


@dataclass(slots=True)
class Reply:
    """`pieces` of the body with the time (`perf_counter`) each came at; `sent`: the request."""

    sent: float
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)

    def events(self) -> Iterator[tuple[float, bytes]]:
        """The data of server-sent events, with the time at which each was complete."""
        rest = b""
        for at, data in self.pieces:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield at, line[5:].strip()


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._reply: Reply | None = None  # None: idle
        self.open = True

    def connection_made(self, transport: Any) -> None:
        self.transport: asyncio.Transport = transport  # uvloop's is one in all but name

    async def exchange(self, request: bytes, reply: Reply) -> bool:
        """Fill `reply`; whether another may follow. Raises OSError when the connection ends before the reply does."""
        self._done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._reply = reply
        self.transport.write(request)
        try:
            return await self._done
        except BaseException:  # nobody reads the rest
            self.transport.abort()
            raise

    def data_received(self, data: bytes) -> None:
        self._now = perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionError(f"what came is not HTTP: {error}"))
            self.transport.abort()

    def on_body(self, data: bytes) -> None:
        if self._reply is not None:
            self._reply.pieces.append((self._now, data))

    def on_message_complete(self) -> None:
        if self._reply is not None:
            self._reply.status = self._parser.get_status_code()
        self.open = self._parser.should_keep_alive()
        self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self._end(error or ConnectionError("the server closed the connection before its answer was complete"))

    def _end(self, error: Exception | None) -> None:
        if self._reply is not None and not self._done.done():
            self._done.set_exception(error) if error else self._done.set_result(self.open)
        self._reply = None


class Client:
    """Requests to one server; connections are kept and used again. Loads nothing but this machine unless told to."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None, allow_remote: bool = False) -> None:
        """`base_url`: scheme, host, port, perhaps a path. SparkrtError if it is none, or not an address of this machine."""
        try:
            url = urlsplit(base_url)
            if not url.hostname:
                raise ValueError("it names no host")
            self._port = url.port or {"http": 80, "https": 443}[url.scheme]
            found = socket.getaddrinfo(url.hostname, self._port, type=socket.SOCK_STREAM)
        except (KeyError, ValueError, OSError) as error:
            raise SparkrtError(f"{base_url} is not the address of a server ({error})") from None
        addresses = [str(entry[4][0]) for entry in found]
        if not allow_remote and not all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in addresses):
            raise SparkrtError(f"{base_url} is not this machine: --allow-remote if its owner agrees to the load")
        self._host, self._addresses = url.hostname, list(dict.fromkeys(addresses))
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._path, self.base_url = url.path.rstrip("/"), base_url.rstrip("/")
        fixed = {"host": url.netloc.rpartition("@")[2], "content-type": "application/json", **(headers or {})}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())
        if "\r\n" in "".join((*fixed, *fixed.values())):
            raise SparkrtError("a header has a line break in it")
        self._idle: list[_Connection] = []

    async def send(self, method: str, path: str, body: bytes = b"", request_id: str = "") -> Reply:
        """The whole answer, whatever its status. Raises OSError when there is none."""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n"
        head += f"x-request-id: {request_id}\r\n" if request_id else ""
        request, reply = f"{head}\r\n".encode() + body, Reply(perf_counter())
        while True:
            used = bool(self._idle)
            connection = self._idle.pop() if used else await self._connect()
            if not connection.open:
                continue
            try:
                again = await connection.exchange(request, reply)
            except OSError:
                if not used or reply.pieces:
                    raise
                continue  # closed by the server as we sent: it was idle for too long
            if again:
                self._idle.append(connection)
            else:
                connection.transport.close()
            return reply

    async def _connect(self) -> _Connection:
        loop, name = asyncio.get_running_loop(), self._host if self._tls else None
        for address in self._addresses[:-1]:
            try:
                return (await loop.create_connection(_Connection, address, self._port, ssl=self._tls, server_hostname=name))[1]
            except OSError:
                continue
        last = self._addresses[-1]
        return (await loop.create_connection(_Connection, last, self._port, ssl=self._tls, server_hostname=name))[1]

    def close(self) -> None:
        for connection in self._idle:
            connection.transport.close()
        self._idle.clear()
