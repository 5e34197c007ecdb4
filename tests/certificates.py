"""Certificates for the tests of TLS: authorities, and what they sign, as PEM files."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass
class Certificate:
    cert: Path
    key: Path
    private_key: ec.EllipticCurvePrivateKey
    subject: x509.Name


def make_certificate(
    folder: Path,
    name: str,
    issuer: Certificate | None = None,
    *,
    days: float = 10,
    names: tuple[str, ...] = ("localhost", "127.0.0.1"),
) -> Certificate:
    """`name`.pem and `name`.key: an authority where there is no issuer; past its time where `days` are negative."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    alternatives = [
        x509.IPAddress(ipaddress.ip_address(one)) if one[0].isdigit() else x509.DNSName(one) for one in names
    ]
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=30))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .sign(issuer.private_key if issuer else key, hashes.SHA256())
    )
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key", key, subject)
    made.cert.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    made.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    made.key.chmod(0o600)
    return made
