"""Published weights that are damaged on their way: a proxy flips bits of what a subscriber receives."""

from __future__ import annotations

import re
import socket
import threading
from typing import Any, Callable

import numpy as np
import pytest

import paramill as pm
from paramill import errors

TIMEOUT = 30.0

_ADDRESS = re.compile(rb"127\.0\.0\.1:(\d{5})")


class Proxy:
    """Stands before a job's coordinator, and before every server whose address the coordinator tells."""

    def __init__(self, url: str, damage: Callable[[bytearray], None]) -> None:
        self._damage = damage
        self._ports: dict[int, int] = {}
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        scheme, rest = url.split("://")
        address, name = rest.split("/")
        self._coordinator = int(address.split(":")[1])
        self.url = f"{scheme}://127.0.0.1:{self._port_before(self._coordinator)}/{name}"

    def close(self) -> None:
        with self._lock:
            for each in self._sockets:
                each.close()

    def _keep(self, each: socket.socket) -> socket.socket:
        with self._lock:
            self._sockets.append(each)
        return each

    def _port_before(self, port: int) -> int:
        """A port whose connections go on to that one. It has as many digits, so that no length in a frame changes."""
        if port not in self._ports:
            while True:
                listener = self._keep(socket.create_server(("127.0.0.1", 0)))
                if len(str(listener.getsockname()[1])) == len(str(port)):
                    break
            self._ports[port] = listener.getsockname()[1]
            threading.Thread(target=self._accept, args=(listener, port), daemon=True).start()
        return self._ports[port]

    def _accept(self, listener: socket.socket, port: int) -> None:
        while True:
            try:
                near = self._keep(listener.accept()[0])
            except OSError:
                return
            far = self._keep(socket.create_connection(("127.0.0.1", port)))
            change = self._redirect if port == self._coordinator else self._damage
            threading.Thread(target=_pass, args=(near, far, None), daemon=True).start()
            threading.Thread(target=_pass, args=(far, near, change), daemon=True).start()

    def _redirect(self, data: bytearray) -> None:
        for found in _ADDRESS.finditer(bytes(data)):
            data[found.start(1) : found.end(1)] = str(self._port_before(int(found[1]))).encode()


def _pass(source: socket.socket, target: socket.socket, change: Callable[[bytearray], None] | None) -> None:
    try:
        while data := bytearray(source.recv(1 << 16)):
            if change is not None:
                change(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


class FlippedBit:
    """Flips one bit of the values that pass, so many times: values of -3.25, so that frames' other bytes stay as they are."""

    NEEDLE = np.full(64, -3.25, np.float32).tobytes()

    def __init__(self, times: float) -> None:
        self.left = times

    def __call__(self, data: bytearray) -> None:
        if self.left > 0 and (at := data.find(self.NEEDLE)) >= 0:
            data[at + 100] ^= 4
            self.left -= 1


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["w"].tobytes() == expected["w"].tobytes()


def test_a_flipped_bit_is_found_and_mended() -> None:
    tensors = {"w": np.zeros(50_000, np.float32)}
    with pm.Publisher(tensors, cores=1, timeout=TIMEOUT) as publisher:
        once = FlippedBit(1)
        proxy = Proxy(publisher.url, once)
        with pm.Subscriber(proxy.url, torch=False, transport="tcp", timeout=TIMEOUT) as subscriber:
            assert_same(subscriber.commit(), tensors)
            before = subscriber.bytes_received
            tensors["w"][10_000:30_000] = -3.25
            publisher.publish(tensors)
            assert subscriber.wait(1) == 1
            assert once.left == 0, "the proxy saw the version"
            assert_same(subscriber.commit(), tensors)
            assert subscriber.bytes_received - before > 2 * 80_000, "it came twice"
        proxy.close()
        proxy = Proxy(publisher.url, FlippedBit(float("inf")))
        with pytest.raises(errors.DamagedError, match="table `w` is not what server 0.* broadcast as version 1"):
            with pm.Subscriber(proxy.url, torch=False, transport="tcp", timeout=TIMEOUT) as subscriber:
                subscriber.commit()
        proxy.close()
