"""TLS of the channel: a certificate made for one launch, sent to its agents with the secret.

The driver's key exists in its memory only. What is sent can be neither read nor changed, repeated or left out, and an
agent accepts no other certificate, so it knows its driver before it sends the secret. An agent is proved by the secret
alone.
"""

from __future__ import annotations

import datetime
import os
import ssl

LIFE = datetime.timedelta(days=3650)  # it ends with the launch; a clock that is wrong must not end it sooner


def new_certificate() -> tuple[ssl.SSLContext, str]:
    """Make (the driver's context with a new key, its certificate as PEM for the agents)."""
    from cryptography import x509  # here: agents import this module too, and need nothing of it
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "sparkring")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - LIFE, now + LIFE)
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody resumes a session
    file = os.memfd_create("certificate")  # ssl loads a key from a file only; this one is in memory and has no name
    try:
        os.write(file, certificate + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context, certificate.decode()


def trusting(certificate: str) -> ssl.SSLContext:
    """Make an agent's context: it accepts this certificate and no other, whatever host it names."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificate)
    return context
