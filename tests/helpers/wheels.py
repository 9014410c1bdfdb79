"""The wheel from which flash_cute was installed."""

from __future__ import annotations

import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest


def pack(folder: Path) -> Path:
    """The wheel that is installed here, packed again from its files: installing changes none of them."""
    dist = distribution("flash_cute")
    files = [file for file in dist.files or [] if ".." not in file.parts and file.suffix != ".pyc"]
    if not any(file.name == "_C.abi3.so" for file in files):
        pytest.skip("flash_cute is installed in editable mode, so there is no wheel to test")
    tag = (dist.read_text("WHEEL") or "").split("Tag: ")[1].split()[0]
    path = folder / f"flash_cute-{dist.version}-{tag}.whl"
    installers_own = ("INSTALLER", "REQUESTED", "direct_url.json")
    kept = [file for file in files if file.name not in installers_own]
    names = {str(file) for file in kept}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in kept:
            if file.name == "RECORD":  # the installer has added its own files
                rows = [row for row in file.read_text().splitlines() if row.rsplit(",", 2)[0].strip('"') in names]
                packed.writestr(str(file), "\n".join(rows) + "\n")
            else:
                packed.write(str(file.locate()), str(file))
    return path
