"""The version of the client, sent in the handshake and shown in status."""

VERSION = __version__ = "0.1.0"
