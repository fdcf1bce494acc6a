"""The version of the client, sent in the handshake and shown in status."""

VERSION = "0.1.0"
