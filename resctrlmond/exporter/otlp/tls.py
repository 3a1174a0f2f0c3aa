# SPDX-License-Identifier: Apache-2.0
"""TLS to a receiver: check the files of the settings, and say why a connection failed.

The settings and their names are those of OpenTelemetry (Protocol Exporter, Configuration Options).
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator

_SETTINGS = ("OTEL_EXPORTER_OTLP_METRICS_{}", "OTEL_EXPORTER_OTLP_{}")
_AUTHORITY, _CERTIFICATE, _KEY = "CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"

_WRONG_KEY = "the certificate and the key of the client do not belong together ({}, {})"
_NO_ANSWER = "it closed the connection without an answer"
# gRPC states it in the middle of a longer text.
_UNTRUSTED_GRPC = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:]+)")
# The words of OpenSSL for a certificate whose authority is not known.
_UNKNOWN = re.compile("self.signed|issuer certificate")


def _setting(name: str) -> tuple[str, str]:
    """Return the variable that sets the file of that name for metrics, and its path; two times "" if none does."""
    variables = (template.format(name) for template in _SETTINGS)
    return next(((variable, path) for variable in variables if (path := os.environ.get(variable))), ("", ""))


def check_files(*, needs_key: bool) -> None:
    """Check that the files of all settings can be read: gRPC ignores a missing one, or aborts the process.

    ``needs_key``: the key of the client must be in a file of its own. Raises ValueError.
    """
    for name in (_AUTHORITY, _CERTIFICATE, _KEY):
        variable, path = _setting(name)
        if not path:
            continue
        try:
            with open(path, "rb") as file:
                is_empty = not file.read(1)
        except OSError as error:
            raise ValueError(f"cannot read {path} ({variable}): {error.strerror}") from error
        if is_empty:
            raise ValueError(f"{path} ({variable}) is empty")
    certificate, _ = _setting(_CERTIFICATE)
    if certificate and needs_key and not _setting(_KEY)[1]:
        raise ValueError(f"{certificate} needs {certificate.replace(_CERTIFICATE, _KEY)} with gRPC")


def reason(error: Exception, url: str) -> str:
    """Return why a request over HTTP to that address failed, without the words of the libraries."""
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _untrusted(cause.verify_message)
        if isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return _with_client(_NO_ANSWER)
        if isinstance(cause, ssl.SSLError):
            return _failed_handshake(cause.reason or "")
    for cause in causes:
        if isinstance(cause, ConnectionResetError):
            is_plain = url.partition(":")[0].lower() == "http"
            return f"{_NO_ANSWER}: it may expect TLS (https://)" if is_plain else _with_client(_NO_ANSWER)
        if isinstance(cause, OSError) and cause.errno and cause.strerror:
            return cause.strerror
    return str(error)


def reason_of_grpc(details: str) -> str:
    """Return why gRPC could not connect, from the details of its error; these, if they have another reason."""
    if found := _UNTRUSTED_GRPC.search(details):
        return _untrusted(found[1])
    if "Hostname Verification Check failed" in details:
        return _untrusted("it is not for the name in the address")
    if "Failed to create security handshaker" in details:
        return _WRONG_KEY.format(*_of_client())
    if "Socket closed" in details:
        return _with_client(f"{_NO_ANSWER}: it may expect TLS (https://), or no TLS")
    return details


def _untrusted(why: str) -> str:
    text = f"its certificate is not accepted: {why.strip().rstrip('.')}"
    return f"{text}. {_variable(_AUTHORITY)} names the file of its authority" if _UNKNOWN.search(why) else text


def _failed_handshake(name: str) -> str:
    """Return the reason for an error of OpenSSL (openssl/sslerr.h)."""
    words = name.lower().replace("_", " ")
    if name in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
        return _WRONG_KEY.format(*_of_client())
    if "ALERT" in name:
        return _with_client(f"it refuses the connection: {words.partition('alert ')[2]}")
    if name in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return "it does not use TLS (http://)"
    return f"TLS failed: {words or 'no reason was given'}"


def _with_client(text: str) -> str:
    return f"{text}. It may require a certificate of the client ({', '.join(_of_client())})"


def _of_client() -> tuple[str, str]:
    return _variable(_CERTIFICATE), _variable(_KEY)


def _variable(name: str) -> str:
    """Return the variable that sets the file of that name now, or could."""
    return _setting(name)[0] or _SETTINGS[-1].format(name)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and what led to it: urllib3 and requests wrap errors in several ways."""
    waiting, seen = [error], set[int]()
    while waiting:
        found = waiting.pop(0)
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        more = (*found.args, getattr(found, "reason", None), found.__cause__, found.__context__)
        waiting += [one for one in more if isinstance(one, BaseException)]
