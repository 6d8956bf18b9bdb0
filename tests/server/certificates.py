"""Certificates for tests, made by ``openssl``."""

import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str) -> tuple[str, str]:
    """A certificate for 127.0.0.1 that signs itself, and its key: their paths."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return str(cert), str(key)
