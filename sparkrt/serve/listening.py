"""Where the server listens: a port or a Unix domain socket, in the clear or by TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

from sparkrt.errors import LoadError
from sparkrt.serve.cli import ServeArgs

BACKLOG = 2048  # connections that wait to be accepted


@contextlib.contextmanager
def listening(args: ServeArgs) -> Iterator[socket.socket]:
    """The listening socket. LoadError, before anything is loaded, says why there can be none, or what is wrong with the keys."""
    if args.ssl_certfile is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
        except OSError as error:  # SSLError among them
            raise LoadError(f"--ssl-certfile {args.ssl_certfile} --ssl-keyfile {args.ssl_keyfile}: {error}") from None
    where = args.uds or f"{args.host}:{args.port}"
    try:
        listener = _at_port(args.host, args.port) if args.uds is None else _at_path(args.uds)
    except OSError as error:
        raise LoadError(f"cannot listen on {where}: {error.strerror or error}") from None
    with listener:
        try:
            yield listener
        finally:
            if args.uds is not None:
                Path(args.uds).unlink(missing_ok=True)


def address(args: ServeArgs, listener: socket.socket) -> str:
    """As a client would write it, but for a Unix domain socket."""
    if args.uds is not None:
        return f"unix:{args.uds}:{args.root_path}"
    port, scheme = listener.getsockname()[1], "http" if args.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{args.host}]' if ':' in args.host else args.host}:{port}{args.root_path}"


def _at_port(host: str, port: int) -> socket.socket:
    family, _, _, _, place = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(place[:2], family=family, backlog=BACKLOG)


def _at_path(path: str) -> socket.socket:
    """A socket that somebody left behind is replaced, one that answers is not."""
    with contextlib.suppress(ConnectionRefusedError, FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(path)
        raise OSError("another server listens there")
    if Path(path).is_socket():
        Path(path).unlink()
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
