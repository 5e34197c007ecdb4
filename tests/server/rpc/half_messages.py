"""HalfMessages: a connection with calls whose messages never end, in HTTP/2 by hand, because no client sends such."""

import select
import socket
import struct

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 4, 6, 8
_ACK, _INITIAL_WINDOW, _DEFAULT_WINDOW = 1, 4, 65_535
_MESSAGE = 15 << 20


class HalfMessages:
    def __init__(self, address: str, calls: int, nbytes: int, method: str = "Insert") -> None:
        """`nbytes` of each call's message are to be sent, as far as the server opens its windows."""
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host.strip("[]"), int(port)))
        self._windows = {0: _DEFAULT_WINDOW}
        self._left: dict[int, int] = {}
        self._initial = _DEFAULT_WINDOW
        self._received = b""
        self.cut = False
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0))
        for stream in range(1, 2 * calls, 2):
            self._windows[stream] = self._initial
            self._left[stream] = nbytes
            self._send(stream, _headers(f"/replay.v1.Replay/{method}".encode()), _HEADERS, 4)
            self._send_data(stream, b"\0" + _MESSAGE.to_bytes(4))

    def go_on(self) -> bool:
        """Sends what may be sent now; whether all has been sent, or the server has ended the connection."""
        readable, _, _ = select.select([self._socket], [], [], 0.02)
        if readable:
            self._receive()
        for stream, left in self._left.items():
            while not self.cut and (n := min(left, 16_384, self._windows[0], self._windows[stream])) > 0:
                self._send_data(stream, bytes(n))
                left -= n
            self._left[stream] = left
        return self.cut or not any(self._left.values())

    def close(self) -> None:
        self._socket.close()

    def _send_data(self, stream: int, data: bytes) -> None:
        self._windows[0] -= len(data)
        self._windows[stream] -= len(data)
        self._send(stream, data, _DATA, 0)

    def _send(self, stream: int, body: bytes, kind: int, flags: int) -> None:
        try:
            self._socket.sendall(_frame(kind, flags, stream, body))
        except OSError:
            self.cut = True

    def _receive(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        self.cut = self.cut or not data
        self._received += data
        while len(self._received) >= 9 + (size := int.from_bytes(self._received[:3])):
            kind, flags, stream = struct.unpack_from(">BBI", self._received, 3)
            body, self._received = self._received[9 : 9 + size], self._received[9 + size :]
            if kind == _WINDOW_UPDATE and stream in self._windows:
                self._windows[stream] += int.from_bytes(body)
            elif kind == _PING and not flags & _ACK:
                self._send(0, body, _PING, _ACK)
            elif kind == _SETTINGS and not flags & _ACK:
                for name, value in struct.iter_unpack(">HI", body):
                    if name == _INITIAL_WINDOW:
                        for each in self._left:
                            self._windows[each] += value - self._initial
                        self._initial = value
                self._send(0, b"", _SETTINGS, _ACK)


def _frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body


def _headers(path: bytes) -> bytes:
    named = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x", b"te": b"trailers"}
    named |= {b"content-type": b"application/grpc"}
    return b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in named.items())
