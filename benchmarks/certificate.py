"""A certificate for the rows with TLS, made by `openssl` at the first use."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environments import FILES


@dataclass(frozen=True)
class Certificate:
    folder: Path

    @property
    def cert(self) -> Path:
        return self.folder / "cert.pem"

    @property
    def key(self) -> Path:
        return self.folder / "key.pem"

    def ensure(self) -> None:
        """Raises RuntimeError with the reason."""
        if self.cert.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        command += ["-days", "3650", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
        try:
            subprocess.run(
                [*command, "-keyout", str(self.key), "-out", str(self.cert)], check=True, capture_output=True, text=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(f"openssl made no certificate: {error}") from error


CERTIFICATE = Certificate(FILES / "tls")
