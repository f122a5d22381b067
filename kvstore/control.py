"""How a command reaches the process that owns a store: a unix socket named `control` in its home.

One request a connection: a line of JSON, {"command": name, "arguments": {...}}, of at most 64 KiB;
the answer is a line of JSON, {"result": {...}} or {"error": "a sentence"}. Only the owner's own
user is heard. One thread serves one connection after the other, each with a deadline, and a few
may wait; whatever a client does ends its connection and nothing else. The store never waits for
one.
"""

import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.home import CONTROL_SOCKET, Home
from kvstore.invalidation import Scope
from kvstore.pin_outcomes import document
from kvstore.repair import Suspect
from kvstore.tiers.errors import ConfigError, KvstoreError, StoreBusyError, StoreError
from kvstore.tiers.io import FileIo

if TYPE_CHECKING:
    from kvstore.store import Store

LOG = logging.getLogger(__name__)
REQUEST_BYTES_MAX = 64 << 10
ANSWER_BYTES_MAX = 1 << 20
REQUEST_S = 2.0  # A client has this long to send its line, and again to take the answer.
WAITING_MAX = 4  # Connections that wait while one is served.
RETRY_S = 0.02
LABELS_MAX = 100
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

Arguments = Mapping[str, Any]
Command = Callable[["Store", Arguments], dict[str, Any]]


class OwnerGoneError(StoreError):
    """No process that owns the store answers."""


def checked(arguments: Arguments, fields: Mapping[str, type[Any]]) -> dict[str, Any]:
    """The arguments, if each is known and of its type; bool is no int. Raises ConfigError."""
    for name, value in arguments.items():
        if name not in fields:
            raise ConfigError(
                f"argument {name!r} is unknown; known are {', '.join(sorted(fields))}"
            )
        if type(value) is not fields[name]:
            raise ConfigError(f"{name} is {value!r:.100}; it must be a {fields[name].__name__}")
    return dict(arguments)


def _drop_bad_blocks(store: "Store", arguments: Arguments) -> dict[str, Any]:
    blocks = checked(arguments, {"blocks": list})["blocks"]
    try:
        suspects = [Suspect(int(s), int(i), bytes.fromhex(key)) for s, i, key in blocks]
        return asdict(store.drop_bad_blocks(suspects))
    except (ValueError, TypeError):
        raise ConfigError("blocks is a list of [segment, index, key], not too many") from None


def _invalidate(store: "Store", arguments: Arguments) -> dict[str, Any]:
    texts = dict.fromkeys(("namespace", "model", "tenant", "prefix"), str)
    done = store.invalidate(Scope(**checked(arguments, {**texts, "everything": bool})))
    return {**asdict(done), "labels": [] if done.blocks else store.labels()[:LABELS_MAX]}


def _resize(store: "Store", arguments: Arguments) -> dict[str, Any]:
    return store.resize(**checked(arguments, {"host_bytes": int, "disk_bytes": int})).document()


def _pin(store: "Store", arguments: Arguments) -> dict[str, Any]:
    asked = checked(arguments, {"key": str, "ttl_s": float})
    if len(asked) < 2:
        raise ConfigError("a pin needs a key and ttl_s")
    return document(store.pin(asked["key"], ttl_s=asked["ttl_s"]))


def _pins(store: "Store", arguments: Arguments) -> dict[str, Any]:
    checked(arguments, {})
    return {"pins": [asdict(pin) for pin in store.pins()]}


def _unpin(store: "Store", arguments: Arguments) -> dict[str, Any]:
    return {"removed": store.unpin(checked(arguments, {"pin_id": int}).get("pin_id", 0))}


# Closed: what is not here cannot be asked for. A command takes its arguments by `checked`, raises
# KvstoreError for wrong ones, and answers what json can say.
COMMANDS: dict[str, Command] = {
    "drop_bad_blocks": _drop_bad_blocks,
    "invalidate": _invalidate,
    "resize": _resize,
    "pin": _pin,
    "pins": _pins,
    "unpin": _unpin,
}


class Control:
    """The owner's side: a thread that serves commands until `close`."""

    def __init__(self, store: "Store", home: Home) -> None:
        """Begin to listen. Where that cannot be, the store works without, and the log says so."""
        self._store = store
        self._home = home
        self._closed = False
        self._lock = threading.Lock()
        self._client: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            home.listen(self._listener)
            self._listener.listen(WAITING_MAX)
        except OSError as error:
            LOG.warning("no command can reach the owner of %s: %s", home.path, error)
            self._listener.close()
            self._thread = None
            return
        self._thread = threading.Thread(target=self._run, name="kvstore-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve nothing more. Waits for the command under way, never for its client."""
        with self._lock:
            self._closed = True
            if self._client is not None:
                _shut(self._client)
        if self._thread is None:
            return
        _shut(self._listener)  # It ends the wait for the next connection.
        self._thread.join()
        self._thread = None
        self._listener.close()
        try:
            self._home.end_listening()
        except OSError as error:
            LOG.warning("the control socket of %s stays: %s", self._home.path, error)

    def _run(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                if not self._closed:
                    time.sleep(RETRY_S)  # Too many descriptors are open, for now.
                continue
            with client:
                with self._lock:
                    self._client = None if self._closed else client
                if self._client is not None:
                    self._serve(client)
                with self._lock:
                    self._client = None

    def _serve(self, client: socket.socket) -> None:
        """Answer one request; a client that sends something else hears nothing."""
        try:
            if _uid_of(client) != os.geteuid():
                return
            line = _line(client, REQUEST_BYTES_MAX, time.monotonic() + REQUEST_S)
            request = _request(line)
            if request is None:
                return
            answer = json.dumps(self._answer(*request)).encode() + b"\n"
            client.settimeout(REQUEST_S)
            client.sendall(answer)
        except OSError:
            pass  # It went away, or took too long.
        except Exception:
            LOG.exception("a command was not answered")

    def _answer(self, command: str, arguments: Arguments) -> dict[str, Any]:
        if command not in COMMANDS:
            return {"error": f"the owner of this store knows no command {command!r:.100}"}
        try:
            return {"result": COMMANDS[command](self._store, arguments)}
        except KvstoreError as error:
            return {"error": str(error)}
        except Exception:
            LOG.exception("command %s failed", command)
            return {"error": f"command {command} failed in the owner; its log says why"}


def call(
    directory: Path, command: str, arguments: Arguments, timeout_s: float = 60.0
) -> dict[str, Any]:
    """Have the owner of the store in `directory` run a command.

    Raises OwnerGoneError where nobody listens, StoreBusyError when too many wait or the answer
    takes longer than `timeout_s` (the command may still be carried out), StoreError with what the
    owner says otherwise.

    Returns: the command's result.
    """
    io = FileIo()
    request = json.dumps({"command": command, "arguments": dict(arguments)}).encode() + b"\n"
    if len(request) > REQUEST_BYTES_MAX:
        raise ConfigError(f"the arguments take more than {REQUEST_BYTES_MAX} bytes; shorten them")
    deadline = time.monotonic() + timeout_s
    place = io.open_directory(directory)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            _connect(client, io, place, directory, deadline)
            if _uid_of(client) != os.geteuid():
                raise StoreError(f"the owner of {directory} is another user; ask it there")
            client.settimeout(max(RETRY_S, deadline - time.monotonic()))
            client.sendall(request)
            line = _line(client, ANSWER_BYTES_MAX, deadline)
    except TimeoutError:
        raise StoreBusyError(
            f"the owner of {directory} did not answer within {timeout_s:g} s; "
            "it may still do what was asked"
        ) from None
    except OSError as error:
        raise OwnerGoneError(
            f"the owner of {directory} ended ({error.strerror}); ask again"
        ) from None
    finally:
        io.close(place)
    return _result(line, directory)


def _connect(
    client: socket.socket, io: FileIo, place: int, directory: Path, deadline: float
) -> None:
    while True:
        client.settimeout(max(RETRY_S, deadline - time.monotonic()))
        try:
            io.connect(client, CONTROL_SOCKET, directory=place)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(RETRY_S)
        except (FileNotFoundError, ConnectionRefusedError):
            raise OwnerGoneError(f"no process that owns {directory} takes commands") from None
        else:
            return


def _result(line: bytes | None, directory: Path) -> dict[str, Any]:
    try:
        answer = json.loads(line) if line is not None else None
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict) and isinstance(answer.get("result"), dict):
        return dict(answer["result"])
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        raise StoreError(answer["error"])
    raise OwnerGoneError(f"the owner of {directory} ended before it answered; ask again")


def _request(line: bytes | None) -> tuple[str, dict[str, Any]] | None:
    """Command and arguments of a request line; None for anything else."""
    try:
        request = json.loads(line) if line is not None else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(request, dict) or request.keys() != {"command", "arguments"}:
        return None
    command, arguments = request["command"], request["arguments"]
    return (command, arguments) if type(command) is str and type(arguments) is dict else None


def _line(client: socket.socket, bytes_max: int, deadline: float) -> bytes | None:
    """All up to the first newline; None when it does not come, or is too long. Raises OSError."""
    data = bytearray()
    while b"\n" not in data:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        client.settimeout(left)
        part = client.recv(min(REQUEST_BYTES_MAX, bytes_max + 1 - len(data)))
        data += part
        if not part or (len(data) > bytes_max and b"\n" not in data[:bytes_max]):
            return None
    return bytes(data[: data.index(b"\n")])


def _uid_of(connection: socket.socket) -> int:
    """The user at the other end, as the kernel has it."""
    size = CREDENTIALS.size
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(CREDENTIALS.unpack(found)[1])


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # The other end may have been faster.
        connection.shutdown(socket.SHUT_RDWR)
