"""The peer of bench/figures/gemini.py: a process that keeps checkpoints in memory, and no torch.

    python -m bench.figures.peer PAYLOAD_BYTES

prints its port, serves one connection, and ends with it.
"""

from __future__ import annotations

import socket
import sys

WRITE, READ = b"w", b"r"  # a checkpoint follows; send back the newest
LIMIT_S = 120.0


def receive(connection: socket.socket, into: memoryview) -> None:
    """Fills `into`; raises ConnectionError if the other end closes before that."""
    while into:
        count = connection.recv_into(into)
        if not count:
            raise ConnectionResetError("the other end has closed the connection")
        into = into[count:]


def serve(payload_bytes: int) -> None:
    kept = [bytearray(payload_bytes), bytearray(payload_bytes)]
    newest = 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        server.settimeout(LIMIT_S)
        connection, _ = server.accept()
    connection.settimeout(None)
    with connection:
        order = bytearray(1)
        while True:
            try:
                receive(connection, memoryview(order))
                if order == READ:
                    connection.sendall(kept[newest])
                    continue
                receive(connection, memoryview(kept[1 - newest]))
                newest = 1 - newest
                connection.sendall(b"\1")
            except ConnectionError:
                return


if __name__ == "__main__":
    serve(int(sys.argv[1]))
