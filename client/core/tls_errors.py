"""What went wrong with TLS, whose fault it is, and what to do."""

import ssl
from typing import Final

from gpulease.client.core.credentials import SecuredAddress
from gpulease.client.errors import Denied, Disconnected, GpuLeaseError, Untrusted

_NEW_ONE: Final = "Ask the operator of the node for a new certificate"

_REFUSED: Final = {
    "CERTIFICATE_EXPIRED": ("has expired, or the node's list of revoked ones has", _NEW_ONE),
    "CERTIFICATE_REVOKED": ("was revoked", _NEW_ONE),
    "UNKNOWN_CA": ("comes from a CA that the node does not know", "Ask the operator which CA the node believes"),
    "CERTIFICATE_REQUIRED": ("is missing", "Set GPULEASE_TLS_CERTIFICATE and GPULEASE_TLS_KEY"),
    "BAD_CERTIFICATE": ("is not accepted by the node", _NEW_ONE),
    "UNSUPPORTED_CERTIFICATE": ("is not one for tenants", _NEW_ONE),
    "CERTIFICATE_UNKNOWN": ("is not accepted by the node", _NEW_ONE),
}
"""Alerts about this end's certificate (RFC 8446, 6.2), as OpenSSL names them behind `ALERT_`."""

_HOST_MISMATCH: Final = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH (x509_vfy.h)."""

_EXPIRED: Final = (9, 10)
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""

_NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")


def error_for(error: Exception, address: SecuredAddress) -> GpuLeaseError:
    """The error to raise for one of TLS's, or of the socket under it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _untrusted(error, address)
    if isinstance(error, ssl.SSLEOFError):
        why = f"{address} closed the connection in the handshake"
        return Disconnected(why, "The node has no room for more connections, or is overloaded: see its log")
    if not isinstance(error, ssl.SSLError):
        return Disconnected(f"the connection to {address} broke: {getattr(error, 'strerror', None) or error}")
    reason = error.reason or ""
    alert = reason.partition("ALERT_")[2]
    if alert in _REFUSED:
        why, hint = _REFUSED[alert]
        return Denied(f"{address} turned this tenant away: the certificate {address.files.certificate} {why}", hint)
    if alert == "PROTOCOL_VERSION":
        return Disconnected(f"{address} does not speak TLS 1.3", "Is it gpuleased?")
    if reason in _NOT_TLS:
        hint = "A daemon's plain port, on its own host alone, is written tcp:HOST:PORT"
        return Disconnected(f"{address} does not speak TLS", hint)
    return Disconnected(f"TLS with {address} failed: {reason.lower().replace('_', ' ') or error}")


def _untrusted(error: ssl.SSLCertVerificationError, address: SecuredAddress) -> Untrusted:
    if error.verify_code in _HOST_MISMATCH:
        why = f"its certificate is not for the name {address.host!r}"
        hint = "Use the name that the node's certificate has"
    elif error.verify_code in _EXPIRED:
        why = f"its certificate does not hold now ({error.verify_message})"
        hint = "Check this host's clock; the operator of the node has to renew it otherwise"
    else:
        why = f"its certificate can't be verified by {address.files.ca} ({error.verify_message})"
        hint = "GPULEASE_TLS_CA must have the certificate of the node's CA"
    return Untrusted(f"{address} could not prove that it is the daemon: {why}", hint)
