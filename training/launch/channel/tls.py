"""TLS of the channel: a certificate made for one launch, sent to its agents with the secret.

The driver's key exists in its memory only. What is sent can be neither read nor changed, repeated or left out, and an
agent accepts no other certificate, so it knows its driver before it sends the secret. An agent is proved by the secret
alone.

Agents that come by themselves cannot be sent a certificate. They and their driver know one secret, of which both make
the same key, and so the same certificate (`shared_certificate`).
"""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509 import CertificateBuilder

SHARED_SINCE = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
OTHER_SECRET = ".other-secret"  # behind the name of an agent: it does not accept the driver's certificate
LIFE = datetime.timedelta(days=3650)  # it ends with the launch; a clock that is wrong must not end it sooner


def new_certificate() -> tuple[ssl.SSLContext, str]:
    """Make (the driver's context with a new key, its certificate as PEM for the agents)."""
    from cryptography import x509  # here: agents import this module too, and need nothing of it
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(key, x509.random_serial_number(), datetime.datetime.now(datetime.UTC))
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    return _context(key, certificate), certificate.decode()


def shared_certificate(secret: str) -> tuple[ssl.SSLContext, str, str]:
    """Make (the driver's context, its certificate as PEM, what agents prove themselves by) of a secret all know.

    The same on every host. The certificate is public, so trying out secrets against it is made slow.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding

    made = hashlib.scrypt(secret.encode(), salt=b"sparkring", n=1 << 14, r=8, p=1, dklen=64)
    key = Ed25519PrivateKey.from_private_bytes(made[:32])  # its signatures are functions of key and text
    certificate = _builder(key, 1, SHARED_SINCE).sign(key, None).public_bytes(Encoding.PEM)
    return _context(key, certificate), certificate.decode(), made[32:].hex()


def _builder(
    key: EllipticCurvePrivateKey | Ed25519PrivateKey, number: int, now: datetime.datetime
) -> CertificateBuilder:
    from cryptography import x509

    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "sparkring")])
    return x509.CertificateBuilder(name, name, key.public_key(), number, now - LIFE, now + 10 * LIFE)


def _context(key: EllipticCurvePrivateKey | Ed25519PrivateKey, certificate: bytes) -> ssl.SSLContext:
    """Make the driver's context."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody resumes a session
    file = os.memfd_create("certificate")  # ssl loads a key from a file only; this one is in memory and has no name
    try:
        os.write(file, certificate + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context


def trusting(certificate: str) -> ssl.SSLContext:
    """Make an agent's context: it accepts this certificate and no other, whatever host it names."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificate)
    return context


def trusting_all() -> ssl.SSLContext:
    """Make the context of a connection that carries nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
