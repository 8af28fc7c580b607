"""Certificates for tests, made by openssl: an authority, two ends of it, and one of another."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    """Paths of PEM files."""

    cert: str
    key: str
    ca: str


def authority(folder: Path, name: str) -> Path:
    """Makes NAME.pem and NAME.key; returns the certificate's path."""
    cert = folder / f"{name}.pem"
    _openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-keyout", str(folder / f"{name}.key"), "-out", str(cert), "-subj", f"/CN={name}",
        "-days", "2", "-addext", "basicConstraints=critical,CA:TRUE",
        "-addext", "keyUsage=critical,keyCertSign",
    )  # fmt: skip
    return cert


def issue(folder: Path, ca: Path, name: str, *, days: int = 2) -> Certificate:
    """A certificate that `ca` signed."""
    key, request, cert = (folder / f"{name}{end}" for end in (".key", ".csr", ".pem"))
    _openssl(
        "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-keyout", str(key), "-out", str(request), "-subj", f"/CN={name}",
    )  # fmt: skip
    _openssl(
        "x509", "-req", "-in", str(request), "-CA", str(ca), "-CAkey", str(ca.with_suffix(".key")),
        "-CAcreateserial", "-out", str(cert), "-days", str(days),
    )  # fmt: skip
    return Certificate(str(cert), str(key), str(ca))


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60, text=True)
