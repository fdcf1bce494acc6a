"""The key with which a peer server shows who it is. Nobody signs it: the other nodes know the
fingerprint of its certificate from the job's store."""

from __future__ import annotations

import datetime
import hashlib
from typing import NamedTuple

#: Fixed, so that a step of the clock ends no connection.
_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_TO = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)


class PeerKey(NamedTuple):
    pem: bytes  # the key and the certificate
    fingerprint: bytes  # SHA-256 of the certificate in DER


def make() -> PeerKey:
    """A new P-256 key. Imports a large library."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "pccheckd")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_TO)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem = private + made.public_bytes(serialization.Encoding.PEM)
    der = made.public_bytes(serialization.Encoding.DER)
    return PeerKey(pem, hashlib.sha256(der).digest())
