"""A server that listens at a free TCP port and has clients at its first and last step only."""

from __future__ import annotations

import socket
import threading

from tests.transparent.targets.steps import Log, words


def serve(server: socket.socket) -> None:
    while True:
        link, _ = server.accept()
        with link:
            link.sendall(link.recv(100).upper())


def asked(server: socket.socket) -> str:
    with socket.create_connection(server.getsockname()) as link:
        link.sendall(b"is anybody there?")
        return link.recv(100).decode().replace(" ", "-")


def main() -> None:
    options = words().parse_args()
    log = Log(options)
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(server,), daemon=True).start()
    first = server.getsockname()
    log.line("begin", asked(server))
    for step in range(1, options.steps + 1):
        log.step(step, server.getsockname() == first)
    log.line("end", asked(server))


if __name__ == "__main__":
    main()
