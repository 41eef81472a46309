"""Whose certificates are believed of an https server: the same for probes, metrics and load. Nothing turns it off.

The load processes ask OpenSSL, which reads SSL_CERT_FILE; what speaks through `requests` is told the same here.
"""

import os
import ssl
from pathlib import Path

import requests

from harness.errors import HarnessError

VARIABLE = "SSL_CERT_FILE"


def authorities() -> str | bool:
    """What `requests` takes as `verify`: the file of SSL_CERT_FILE, else the system's, else those that come with it."""
    paths = ssl.get_default_verify_paths()
    return paths.cafile or paths.capath or True


def open_session(api_key: str | None) -> requests.Session:
    """What asks a server for anything but load."""
    session = requests.Session()
    session.trust_env = False  # a proxy of the environment must not stand between us and the server
    session.verify = authorities()
    if api_key:
        session.headers["Authorization"] = f"Bearer {api_key}"
    return session


def trust(ca: Path) -> None:
    """Believe what this authority has signed, and nobody else, here and in every process started from here.

    Raises HarnessError for a file that holds no certificate.
    """
    refuse_no_authority(ca)
    os.environ[VARIABLE] = str(ca.resolve())


def refuse_no_authority(ca: Path) -> None:
    """Raise HarnessError for a file that holds no certificate."""
    try:
        ssl.create_default_context(cafile=str(ca))
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise HarnessError(
            f"--ca: {ca} holds no certificate in PEM form ({getattr(error, 'strerror', None) or error})",
            next_step="Give the certificate of the authority that signed the server's, in PEM form.",
        ) from None
