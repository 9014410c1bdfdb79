"""Turns the compiler's own account of every kernel into data: flash_cute/compile_report.json."""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import re
from pathlib import Path
from typing import Any

_ENTRY = re.compile(r"Compiling entry function '(?P<kernel>\S+)' for '(?P<arch>\S+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
_CODE = re.compile(r"\bC7\d{3}\b")


def make_report(nvcc_version: str, logs: list[Path], lineinfo: bool = False) -> dict[str, Any]:
    """The report of the files whose logs (written by compiler.py beside each object) are given."""
    report: dict[str, Any] = {"nvcc": nvcc_version, "seconds": 0.0, "lineinfo": lineinfo}
    report |= {"kernels": [], "files": [], "warnings": []}
    for path in logs:
        log = json.loads(path.read_text())
        file = path.name.removesuffix(".o.json") + ".cu"
        report["files"].append({"file": file, "seconds": log["seconds"], "gib": log["gib"]})
        report["kernels"] += parse_kernels(file, log["output"])
        report["warnings"] += parse_warnings(file, log["output"])
    report["seconds"] = round(sum((entry["seconds"] for entry in report["files"]), 0.0), 1)
    return report


def parse_kernels(file: str, output: str) -> list[dict[str, Any]]:
    """What `ptxas -v` says of each kernel, one entry a kernel and architecture."""
    kernels: list[dict[str, Any]] = []
    entry: dict[str, Any] | None = None
    for line in output.splitlines():
        if found := _ENTRY.search(line):
            entry = {"file": file, "arch": found["arch"], "kernel": demangle(found["kernel"])}
        elif entry is None:
            continue
        elif found := _FRAME.search(line):
            entry |= zip(("stack", "spill_stores", "spill_loads"), map(int, found.groups()), strict=True)
        elif found := _USED.search(line):
            entry |= {"registers": int(found[1]), "smem_static": int(found[2] or 0)}
            kernels.append(entry)
            entry = None
    return kernels


def parse_warnings(file: str, output: str) -> list[dict[str, str]]:
    """Warnings and ptxas's numbered remarks (C7508, C7510, C7515: wgmma was serialised), each once."""
    warnings = []
    for line in dict.fromkeys(output.splitlines()):
        code = _CODE.search(line)
        if code or re.search(r"\bwarning\b", line):
            warnings.append({"file": file, "code": code[0] if code else "", "text": line.strip()})
    return warnings


def demangle(name: str) -> str:
    try:
        library = ctypes.CDLL(ctypes.util.find_library("stdc++") or "libstdc++.so.6")
        free = ctypes.CDLL(None).free
    except OSError:
        return name
    convert = library.__cxa_demangle
    convert.restype = ctypes.c_void_p
    free.argtypes = [ctypes.c_void_p]
    status = ctypes.c_int()
    pointer = convert(name.encode(), None, None, ctypes.byref(status))
    if not pointer:
        return name
    text = (ctypes.cast(pointer, ctypes.c_char_p).value or b"").decode()
    free(pointer)
    return text
