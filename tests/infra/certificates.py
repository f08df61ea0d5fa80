"""A certificate authority for tests, by the openssl command."""

import ssl
import subprocess
from pathlib import Path


class Authority:
    """`ca`: its certificate. `of(name)` makes (certificate, key) for names and addresses."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self.ca = folder / f"{name}.crt"
        self._key = folder / f"{name}.key"
        subject = ["-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:TRUE"]
        _openssl("req", "-x509", *_NEW_KEY, "-keyout", self._key, "-out", self.ca, "-days", "2", *subject)

    def of(self, name: str, *alternatives: str) -> tuple[Path, Path]:
        """`alternatives` like `IP:127.0.0.1`; none: for a client."""
        certificate, key, request = (self._folder / f"{name}.{end}" for end in ("crt", "key", "csr"))
        _openssl("req", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        extensions = self._folder / f"{name}.ext"
        lines = ["basicConstraints=CA:FALSE", *([f"subjectAltName={','.join(alternatives)}"] if alternatives else [])]
        extensions.write_text("\n".join(lines), encoding="utf-8")
        signed_by = ["-CA", self.ca, "-CAkey", self._key, "-CAcreateserial", "-days", "2", "-extfile", extensions]
        _openssl("x509", "-req", "-in", request, "-out", certificate, *signed_by)
        return certificate, key

    def context(self) -> ssl.SSLContext:
        """Of a client that trusts this authority alone."""
        return ssl.create_default_context(cafile=str(self.ca))


_NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


def _openssl(*words: object) -> None:
    done = subprocess.run(["openssl", *map(str, words)], check=False, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
