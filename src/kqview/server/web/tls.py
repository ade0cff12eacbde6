"""The certificate that a server identifies itself with."""

import ssl
from pathlib import Path
from typing import NoReturn

from kqview.errors import RequestError
from kqview.server.settings import Settings


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """The certificate that the server identifies itself with; None for plain HTTP.

    Raises:
        RequestError: A file cannot be read or holds something else, the key is encrypted, or it
            does not belong to the certificate.
    """
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        if key is not None:
            raise RequestError(
                "ssl_keyfile is given without ssl_certfile; give the certificate "
                "too (--ssl-certfile)"
            )
        return None
    _check(certificate, "ssl_certfile", b"-----BEGIN CERTIFICATE-----", "certificate")
    name = "ssl_certfile" if key is None else "ssl_keyfile"
    _check(key or certificate, name, b"PRIVATE KEY-----", "private key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise RequestError(
                f"the key in {key or certificate!r} does not belong to the "
                f"certificate in {certificate!r}; give the two that were made together"
            ) from None
        raise RequestError(
            f"ssl_certfile {certificate!r} and its key cannot be used: "
            f"{error.reason or error}; make them again"
        ) from None
    return context


def _check(path: str, name: str, mark: bytes, kind: str) -> None:
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(
            f"{name} {path!r} cannot be read: {reason}; name a readable file"
        ) from None
    if mark not in data:
        raise RequestError(f"{name} {path!r} holds no {kind} in PEM; name a file that does")


def _refuse_password() -> NoReturn:
    raise RequestError(
        "the private key is encrypted, and a server has nobody to ask for the passphrase; store it "
        "without a passphrase: openssl pkey -in KEY -out PLAIN"
    )
