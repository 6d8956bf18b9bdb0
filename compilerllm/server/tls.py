"""TLS: a context that takes a renewed certificate without a new connection being refused."""

import logging
import os
import ssl

from compilerllm.server.config import ServerConfig
from compilerllm.server.errors import CannotServeTLS

log = logging.getLogger("compilerllm.server")
_CERT_REQS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


class Certificate:
    """The server's certificate and key, and the context that serves them."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ``CannotServeTLS``."""
        assert config.ssl_certfile is not None
        self._cert, self._key = config.ssl_certfile, config.ssl_keyfile
        self._load(
            self._new_context()
        )  # a copy first, here and below: half a pair must not spoil the one in use
        self.context = self._new_context()
        self._load(self.context)
        self.context.verify_mode = _CERT_REQS[config.ssl_cert_reqs]
        if config.ssl_ca_certs is not None:
            try:
                self.context.load_verify_locations(config.ssl_ca_certs)
            except (OSError, ssl.SSLError) as error:
                raise CannotServeTLS(config.ssl_ca_certs, _reason(error)) from error

    def reload(self) -> None:
        """Read the files anew, for connections from now on. If they are of no use, the old ones stay, and the log says why."""
        try:
            self._load(self._new_context())
            self._load(self.context)
        except CannotServeTLS as error:
            log.error("The certificate stays as it was: %s", error)
        else:
            log.info("Read the certificate %s anew.", self._cert)

    def _new_context(self) -> ssl.SSLContext:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 and later

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise CannotServeTLS(self._cert, _reason(error)) from error


def _no_password() -> str:
    """OpenSSL would ask on the terminal, and a server would hang there."""
    raise ValueError("its key has a password")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "it is not PEM"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error)
