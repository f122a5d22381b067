"""Commands reach the owner of a store; what a client does wrong ends its connection alone."""

import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.control import (
    COMMANDS,
    REQUEST_BYTES_MAX,
    WAITING_MAX,
    Arguments,
    OwnerGoneError,
    call,
    checked,
)
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.errors import ConfigError, StoreBusyError, StoreError

SIZES: dict[str, Any] = {"host": "8MiB", "disk_capacity": "32MiB"}
GATE, WAITING = threading.Event(), threading.Event()


def _count(store: Store, arguments: Arguments) -> dict[str, Any]:
    given = checked(arguments, {"add": int, "why": str})
    return {"blocks": len(store._placement.index) + given.get("add", 0)}


def _wait(store: Store, arguments: Arguments) -> dict[str, Any]:
    WAITING.set()
    GATE.wait(20)
    return {}


def _fail(store: Store, arguments: Arguments) -> dict[str, Any]:
    raise RuntimeError("a bug")


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, command in {"count": _count, "wait": _wait, "fail": _fail}.items():
        monkeypatch.setitem(COMMANDS, name, command)
    GATE.clear()
    WAITING.clear()
    yield
    GATE.set()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with open_store(tmp_path / "store", **SIZES) as store:
        assert store.config.home is not None
        yield store.config.home


def connect(home: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(10)
    client.connect(str(home / "control"))
    return client


def heard(home: Path, data: bytes) -> bytes:
    """What the owner says to raw bytes before it ends the connection."""
    with connect(home) as client:
        try:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            return client.recv(1 << 16)
        except (BrokenPipeError, ConnectionResetError):
            return b""


def test_a_command_is_answered(home: Path) -> None:
    assert call(home, "count", {"add": 5}) == {"blocks": 5}
    assert call(home, "count", {}) == {"blocks": 0}


def test_only_the_owners_user_may_connect(home: Path) -> None:
    mode = (home / "control").lstat().st_mode
    assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"no json\n",
        b"[" * 50_000 + b"\n",
        b'{"command": "count", "arguments": {}}',  # never ended
        b'["count", {}]\n',
        b'{"command": "count"}\n',
        b'{"command": "count", "arguments": []}\n',
        b'{"command": 3, "arguments": {}}\n',
        b'{"command": "count", "arguments": {}, "more": 1}\n',
        b'{"command": "count", "arguments": {"why": "' + b"x" * REQUEST_BYTES_MAX + b'"}}\n',
        b"\xff\xfe\n",
    ],
)
def test_a_bad_request_hears_nothing_and_harms_nobody(home: Path, data: bytes) -> None:
    assert heard(home, data) == b""
    assert call(home, "count", {}) == {"blocks": 0}


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        ("nothing", {}, "knows no command"),
        ("count", {"subtract": 1}, "unknown"),
        ("count", {"add": "1"}, "must be a int"),
        ("count", {"add": True}, "must be a int"),
        ("fail", {}, "its log says why"),
    ],
)
def test_a_wrong_command_is_answered_with_a_sentence(
    home: Path, command: str, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(StoreError, match=says):
        call(home, command, arguments)
    assert call(home, "count", {}) == {"blocks": 0}


def test_arguments_beyond_a_line_are_refused_at_once(home: Path) -> None:
    with pytest.raises(ConfigError, match="shorten"):
        call(home, "count", {"why": "x" * REQUEST_BYTES_MAX})


def test_without_an_owner_nobody_answers(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", **SIZES):
        assert (tmp_path / "store" / "control").exists()
    assert not (tmp_path / "store" / "control").exists()
    with pytest.raises(OwnerGoneError):
        call(tmp_path / "store", "count", {})


def test_the_socket_of_a_killed_owner_is_replaced(tmp_path: Path) -> None:
    code = (
        f"import os, kvstore; kvstore.open({str(tmp_path / 'store')!r}, **{SIZES!r}); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "store" / "control").exists()
    with pytest.raises(OwnerGoneError):
        call(tmp_path / "store", "count", {})
    with open_store(tmp_path / "store", **SIZES):
        assert call(tmp_path / "store", "count", {}) == {"blocks": 0}


def test_a_file_under_the_sockets_name_is_left_alone(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", **SIZES):
        pass
    (tmp_path / "store" / "control").write_text("mine")
    with open_store(tmp_path / "store", **SIZES) as store:
        store.flush()
    assert (tmp_path / "store" / "control").read_text() == "mine"


def test_a_path_longer_than_a_sockets_may_be(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    with open_store(deep / "store", **SIZES):
        assert call(deep / "store", "count", {}) == {"blocks": 0}


def test_clients_that_say_nothing_hold_up_neither_store_nor_stop(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", **SIZES)
    clients = []
    for _ in range(WAITING_MAX + 1):
        client = connect(tmp_path / "store")
        client.sendall(b'{"command": "cou')
        clients.append(client)
    store.flush()
    with pytest.raises(StoreBusyError, match="did not answer"):
        call(tmp_path / "store", "count", {}, timeout_s=0.1)
    began = time.monotonic()
    store.close()
    assert time.monotonic() - began < 2.0
    for client in clients:
        client.close()


def test_an_answer_that_does_not_come_in_time(home: Path) -> None:
    with pytest.raises(StoreBusyError, match="may still do"):
        call(home, "wait", {}, timeout_s=0.1)
    GATE.set()
    assert call(home, "count", {}) == {"blocks": 0}


def test_an_owner_that_stops_meanwhile(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", **SIZES)
    with connect(tmp_path / "store") as client:
        client.sendall(json.dumps({"command": "wait", "arguments": {}}).encode() + b"\n")
        assert WAITING.wait(10)
        closing = threading.Thread(target=store.close)
        closing.start()
        assert client.recv(100) == b""
        GATE.set()
        closing.join(20)
    assert not closing.is_alive()
    assert os.listdir(tmp_path / "store").count("control") == 0
