"""ServerCertificates: the server's TLS certificate, private key and client authority. They may change while it runs."""

from __future__ import annotations

import logging

import grpc

from replay_protos.transport import PemFiles, readable_by_others
from replay_server.config import SecuritySection
from replay_server.rpc.file_watch import FileWatch

log = logging.getLogger("replay_server")


class ServerCertificates:
    """Reads changed files again. If the new files cannot be used, the certificates read before stay in force."""

    def __init__(self, section: SecuritySection) -> None:
        """Raises ValueError that names the file and the remedy."""
        self._section = section
        self._watch = FileWatch(section.tls_cert, section.tls_key, section.tls_client_ca)
        self._pem = self._read()
        if section.tls_key is not None and readable_by_others(section.tls_key):
            log.warning("tls_key %s can be read by every user of this machine: chmod 600 it", section.tls_key)

    def credentials(self) -> grpc.ServerCredentials | None:
        """The credentials for gRPC's port; None if the configuration does not ask for TLS."""
        if self._section.tls_cert is None:
            return None
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            self._changed_configuration,  # type: ignore[arg-type]  # None is allowed, whatever the type stubs say
            self._section.tls_client_ca is not None,
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        assert self._pem.key is not None
        assert self._pem.cert is not None
        return grpc.ssl_server_certificate_configuration([(self._pem.key, self._pem.cert)], self._pem.ca)

    def _changed_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """gRPC calls this for each handshake, on a thread of its own. None means: as before."""
        if not self._watch.has_changed():
            return None
        try:
            self._pem = self._read()
        except ValueError as error:
            log.error("%s; the certificates read before stay in force", error)
            return None
        log.info("tls_cert %s was read again", self._section.tls_cert)
        return self._configuration()

    def _read(self) -> PemFiles:
        section = self._section
        return PemFiles.read(
            cert=section.tls_cert, key=section.tls_key, ca=section.tls_client_ca, ca_name="tls_client_ca"
        )
