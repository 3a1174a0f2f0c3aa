# SPDX-License-Identifier: Apache-2.0
"""TLS of the server: check the files of the options, and state why a handshake failed."""

from __future__ import annotations

import base64
import contextlib
import datetime
import logging
import re
import ssl
import time
from pathlib import Path

log = logging.getLogger(__name__)

# The labels that OpenSSL reads as certificates.
_PEM = re.compile(rb"-----BEGIN ((?:X509 |TRUSTED )?CERTIFICATE)-----\s(.*?)-----END \1-----", re.DOTALL)
# Tags of ASN.1 in a certificate (X.690; RFC 5280, section 4.1).
_SEQUENCE, _VERSION, _UTC_TIME = 0x30, 0xA0, 0x17
_MISMATCH = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH")


class _EncryptedError(Exception):
    """The key needs a passphrase."""


def server_context(certfile: str, keyfile: str | None, client_cafile: str | None) -> ssl.SSLContext:
    """Return the context of a server; with ``client_cafile``, clients need a certificate that it signed.

    Log a warning if clients will not accept the certificate, such as one that has expired: the clock may be wrong.
    Raises OSError that names the file.
    """
    for option, path in (("--certfile", certfile), ("--keyfile", keyfile), ("--client-cafile", client_cafile)):
        if path is not None:
            _check_readable(option, path)
    _authorities(certfile, "--certfile")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, certfile, keyfile)
    if remark := _remark(context, certfile):
        log.warning(
            "clients will not accept the certificate %s: %s. Replace it, and restart the exporter", certfile, remark
        )
    if client_cafile is not None:
        _authorities(client_cafile, "--client-cafile")
        context.load_verify_locations(client_cafile)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def expiries(certfile: str, client_cafile: str | None) -> dict[str, float]:
    """Return when the first certificate of each file expires (seconds since the epoch), by the option of the file.

    Each certificate of ``certfile`` is sent to clients. An authority of ``client_cafile`` that has expired already,
    such as one that a bundle still has after a rotation, accepts no client: it counts only if no authority is valid.
    """
    authorities = _expiries(client_cafile) if client_cafile else []
    now = time.time()
    valid = [at for at in authorities if at > now]
    found = {"certfile": _expiries(certfile), "client-cafile": valid or authorities}
    return {option: min(times) for option, times in found.items() if times}


def _expiries(path: str) -> list[float]:
    """Return when each certificate in the file expires, if its date can be read.

    Python's ssl module returns the dates only of authorities and of a peer's certificate that is still valid.
    """
    found = []
    for block in _PEM.finditer(Path(path).read_bytes()):
        with contextlib.suppress(ValueError, IndexError):
            found.append(_not_after(base64.b64decode(block[2])))
    return found


def _not_after(certificate: bytes) -> float:
    """Return the end of the validity of a certificate in DER. Raises ValueError or IndexError if it is not one."""
    _, signed, _ = _element(certificate)
    _, fields, _ = _element(signed)
    tag, _, rest = _element(fields)
    # The version is optional. Then: serial number, algorithm, issuer, validity.
    for _ in range(3 if tag == _VERSION else 2):
        _, _, rest = _element(rest)
    tag, validity, _ = _element(rest)
    if tag != _SEQUENCE:
        raise ValueError("the certificate has no validity")
    _, _, rest = _element(validity)
    tag, date, _ = _element(rest)
    text = date.decode("ascii")
    if tag == _UTC_TIME:
        # RFC 5280, section 4.1.2.5.1.
        text = ("19" if text[:2] >= "50" else "20") + text
    return datetime.datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=datetime.UTC).timestamp()


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """Return the tag and the content of the first element in DER, and the bytes after it."""
    length, start = data[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[2:start], "big")
    return data[0], data[start : start + length], data[start + length :]


def _check_readable(option: str, path: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        remedy = "Check the path, and that the exporter may read it"
        if isinstance(error, PermissionError):
            remedy = "Let systemd read it with LoadCredential=, see resctrlmon-exporter(8), EXAMPLES"
        raise OSError(f"cannot read {path} ({option}): {error.strerror}. {remedy}") from error


def _authorities(path: str, option: str) -> ssl.SSLContext:
    """Return the context of a client that accepts the certificates in the file. Raises OSError if it has none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise OSError(
            f"{path} ({option}) has no valid certificate in PEM, which begins with -----BEGIN CERTIFICATE-----: "
            f"{_words(error)}. Name another file"
        ) from error
    return context


def _load(context: ssl.SSLContext, certfile: str, keyfile: str | None) -> None:
    key = keyfile or certfile

    def passphrase() -> str:
        # Without this, OpenSSL asks the terminal.
        raise _EncryptedError

    try:
        context.load_cert_chain(certfile, key, passphrase)
    except _EncryptedError:
        raise OSError(
            f"the key {key} is encrypted, and the exporter has no passphrase. Decrypt it into another file: openssl "
            f"pkey -in {key} -out FILE, and name FILE as the key"
        ) from None
    except OSError as error:
        name = getattr(error, "reason", None) or ""
        if name in _MISMATCH:
            raise OSError(
                f"the certificate {certfile} and the key {key} do not belong together. Name the key with which the "
                "certificate was created"
            ) from error
        if name:
            raise OSError(f"cannot use the certificate {certfile}: {_words(error)}. Create another one") from error
        remedy = "Name another file" if keyfile else "Name the file of the key with --keyfile"
        raise OSError(f"{key} has no key in PEM that can be used. {remedy}") from error


def _remark(context: ssl.SSLContext, certfile: str) -> str:
    """Return why a client that trusts the certificate itself does not accept it; "" if it does.

    This is a handshake in memory: Python has no function that reads the dates of a certificate.
    """
    trusting = _authorities(certfile, "--certfile")
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (client, server, client):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except ssl.SSLError as error:
        return _words(error)
    return ""


def reason(error: OSError) -> str:
    """Return why the handshake with a client failed, with the remedy if it is known."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the client is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionError) or not isinstance(
        error, ssl.SSLError
    ):
        return "it was closed during the TLS handshake"
    name = error.reason or ""
    if name in ("HTTP_REQUEST", "WRONG_VERSION_NUMBER"):
        return "the client does not use TLS (https, or scheme: https in the job of Prometheus)"
    if name == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the client has no certificate (cert_file and key_file in the job of Prometheus)"
    if "ALERT" in name:
        return f"the client refuses the connection: {_words(error).partition('alert ')[2]}"
    return f"the TLS handshake failed: {_words(error)}"


def _words(error: OSError) -> str:
    """Return the reason of OpenSSL (openssl/sslerr.h) in words, or that of the kernel."""
    name = getattr(error, "reason", None) or ""
    return name.lower().replace("_", " ") or error.strerror or str(error)
