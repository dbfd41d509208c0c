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
RAMP_UP = 0.3  # share of the time before counting begins: slow start, and the first burst


def receive(host: str) -> float:
    with socket.create_server((host, PORT)) as server:
        server.settimeout(20)
        connection, _ = server.accept()
        seconds = float(connection.recv(64).decode().split()[0])
        began = time.perf_counter()
        counted, first, last = 0, began, began
        while data := connection.recv(CHUNK_BYTES):
            last = time.perf_counter()
            if last - began < RAMP_UP * seconds:
                first = last
            else:
                counted += len(data)
        return 8 * counted / max(last - first, 1e-9)


def send(host: str, seconds: float) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            connection = socket.create_connection((host, PORT), timeout=5)
            break
        except ConnectionRefusedError:  # the receiver is still starting
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    with connection:
        connection.sendall(f"{seconds} ".encode().ljust(64))
        data, end = bytes(CHUNK_BYTES), time.monotonic() + seconds
        while time.monotonic() < end:
            connection.sendall(data)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        print(receive(sys.argv[2]))
    else:
        send(sys.argv[2], float(sys.argv[3]))
