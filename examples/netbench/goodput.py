"""One TCP connection as fast as it goes: what a link really carries.

python goodput.py receive 10.77.0.2           prints bits of payload per second
python goodput.py send 10.77.0.2 SECONDS
"""

from __future__ import annotations

import socket
import sys
import time

PORT = 29400
CHUNK_BYTES = 1 << 17
START_SECONDS = 20  # for the other end to come


def receive(host: str) -> float:
    with socket.create_server((host, PORT)) as server:
        server.settimeout(START_SECONDS)
        connection, _ = server.accept()
        # All data comes after this moment, so that a busy machine can make the link look slower
        # than it is, but never faster.
        began = last = time.perf_counter()
        connection.sendall(b"go")
        count = 0
        while data := connection.recv(CHUNK_BYTES):
            count += len(data)
            last = time.perf_counter()
        return 8 * count / max(last - began, 1e-9)


def send(host: str, seconds: float) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            connection = socket.create_connection((host, PORT), timeout=START_SECONDS)
            break
        except ConnectionRefusedError:  # the receiver is still starting
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    with connection:
        connection.recv(2)
        data, end = bytes(CHUNK_BYTES), time.monotonic() + seconds
        while time.monotonic() < end:
            connection.sendall(data)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        print(receive(sys.argv[2]))
    else:
        send(sys.argv[2], float(sys.argv[3]))
