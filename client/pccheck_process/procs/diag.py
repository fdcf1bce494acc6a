"""Asks the kernel which unix sockets are connected: /proc/net/unix shows no peers."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator

_NETLINK_SOCK_DIAG = 4
_BY_FAMILY, _DONE, _ERROR = 20, 3, 2  # SOCK_DIAG_BY_FAMILY, NLMSG_DONE, NLMSG_ERROR
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_SHOW_PEER, _SHOW_WAITING = 4, 8  # UDIAG_SHOW_PEER, UDIAG_SHOW_ICONS
_PEER, _WAITING = 2, 3  # UNIX_DIAG_PEER, UNIX_DIAG_ICONS
_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_MESSAGE_BYTES = 16  # of struct unix_diag_msg
_ANY = (0xFFFFFFFF, 0xFFFFFFFF)  # no cookie: every socket
_REPLY_BYTES = 1 << 20
_LIMIT_S = 5.0


def unix_peers() -> dict[int, int]:
    """For each connected unix socket the inode of its peer, 0 when the peer is closed.

    The peer of a connection that nobody accepted yet is the listening socket. Raises OSError when
    the kernel does not answer: it has no unix_diag.
    """
    peers: dict[int, int] = {}
    waiting: dict[int, int] = {}
    for inode, kind, value in _attributes():
        if kind == _PEER and len(value) >= 4:
            peers[inode] = int.from_bytes(value[:4], sys.byteorder)
        elif kind == _WAITING:
            for at in range(0, len(value) - 3, 4):
                waiting[int.from_bytes(value[at : at + 4], sys.byteorder)] = inode
    for client, listener in waiting.items():
        if not peers.get(client):
            peers[client] = listener
    return peers


def _attributes() -> Iterator[tuple[int, int, bytes]]:
    """Inode of a socket, kind and bytes of an attribute."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as asked:
        asked.settimeout(_LIMIT_S)
        shown = _SHOW_PEER | _SHOW_WAITING
        body = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, shown, *_ANY)
        length = _HEADER.size + len(body)
        asked.send(_HEADER.pack(length, _BY_FAMILY, _REQUEST_DUMP, 1, 0) + body)
        while True:
            reply = asked.recv(_REPLY_BYTES)
            if not reply:
                raise OSError("the kernel ended its list of unix sockets early")
            for kind, message in _messages(reply):
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    raise OSError("the kernel does not list unix sockets")
                yield from _of_socket(message)


def _messages(reply: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _HEADER.size <= len(reply):
        length, kind, *_ = _HEADER.unpack_from(reply, at)
        if length < _HEADER.size:
            return
        yield kind, reply[at + _HEADER.size : at + length]
        at += length + 3 & ~3


def _of_socket(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    if len(message) < _MESSAGE_BYTES:
        return
    inode = int.from_bytes(message[4:8], sys.byteorder)
    at = _MESSAGE_BYTES
    while at + 4 <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if length < 4:
            return
        yield inode, kind, message[at + 4 : at + length]
        at += length + 3 & ~3
