"""How a node shows who it is to the other nodes, and who may read what. Keys, tokens and (unless
`--listen` names a port) ports follow from a secret in the storage directory. So the addresses that
other nodes have kept stay valid after a restart of the daemon."""

from __future__ import annotations

import datetime
import hashlib
import hmac
from typing import NamedTuple

#: Fixed, so that a step of the clock ends no connection.
_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_TO = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)
#: Below the ports that systems choose by themselves.
PORT_FIRST, PORT_COUNT = 20_000, 12_000


class PeerKey(NamedTuple):
    pem: bytes  # the key and the certificate
    fingerprint: bytes  # SHA-256 of the certificate in DER


class NodeIdentity:
    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def token(self, uid: int, job: str) -> bytes:
        """A reader that has it may read every checkpoint of the job on this node; 32 bytes."""
        return self._derived(f"token {uid} {job}")

    def port(self, uid: int) -> int:
        """Where the user's server listens when --listen names no port, if this port is free."""
        return PORT_FIRST + int.from_bytes(self._derived(f"port {uid}")[:8]) % PORT_COUNT

    def key(self, uid: int) -> PeerKey:
        """Ed25519, whose signatures are not random: the certificate is always the same one. Nobody
        else signs it: the other nodes know its fingerprint from the job's store. Imports a large
        library."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key = Ed25519PrivateKey.from_private_bytes(self._derived(f"key {uid}"))
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "pccheckd")])
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(_FROM)
            .not_valid_after(_TO)
            .sign(key, None)
        )
        form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        pem = key.private_bytes(serialization.Encoding.PEM, form, plain)
        pem += made.public_bytes(serialization.Encoding.PEM)
        der = made.public_bytes(serialization.Encoding.DER)
        return PeerKey(pem, hashlib.sha256(der).digest())

    def _derived(self, purpose: str) -> bytes:
        return hmac.digest(self._secret, purpose.encode(), "sha256")
