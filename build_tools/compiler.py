"""Runs g++ or nvcc for ninja, unless it would compile what it has compiled before: compiler.py VERSION COMMAND...

Time stamps cannot tell that: each time pip builds, it installs the same torch and CUDA headers again, and in a fresh
checkout every file is new. So a command is skipped if it, the compiler's version and the contents of all files that
it read are those of the object that is there.

OBJECT.json holds what was compared, the seconds of processor time, the memory and what the compiler said (`ptxas -v`),
which report.py reads. Only what a person should see (warnings, errors) is passed on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKS = ROOT / "build/links"  # torch, cuda and cutlass, wherever they are in this build

# --only=sm80:FLAG is a flag for the files that are generated from csrc/sm80, which are named sm80_*.
ONLY = "--only="

QUIET = ("ptxas info", "    0 bytes stack frame", "nvcc info", "ptxas-info")


def main() -> int:
    version, *command = sys.argv[1:]
    if "-c" not in command:  # it links, or says its version
        os.execv(command[0], command)
    source, target = Path(_after("-c", command)), Path(_after("-o", command))
    command = flags_of_folder(command, source.name.split("_")[0])
    command = with_depfile(command, depfile := f"{target}.d")
    key = [version, *(word.replace(str(ROOT), ".") for word in command)]
    log = Path(f"{target}.json")
    if target.exists() and is_fresh(log, key):
        return 0
    log.unlink(missing_ok=True)  # an interrupted compiler leaves half an object
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    for line in done.stdout.splitlines():
        if not line.startswith(QUIET):
            print(line)
    if done.returncode == 0:
        files = {name: digest(name) for name in files_read(Path(depfile).read_text())}
        # What report.py makes of a kernel file: seconds of processor time, and the GiB that its largest process had.
        cost = {"seconds": round(used.ru_utime + used.ru_stime, 1), "gib": round(used.ru_maxrss / 2**20, 2)}
        log.write_text(json.dumps({**cost, "output": done.stdout, "key": key, "files": files}))
    return done.returncode


def _after(flag: str, command: list[str]) -> str:
    """What follows the last `flag`: BuildExtension says -c twice."""
    return command[len(command) - command[::-1].index(flag)]


def flags_of_folder(command: list[str], folder: str) -> list[str]:
    """The command with the flags of this folder of csrc/ and without the other folders' flags."""
    mine = f"{ONLY}{folder}:"
    return [word.removeprefix(mine) for word in command if word.startswith(mine) or not word.startswith(ONLY)]


def with_depfile(command: list[str], depfile: str) -> list[str]:
    """The command with a list of all files it reads: BuildExtension leaves out system headers, or the whole list."""
    without = [word for word in command if word not in ("-MD", "-MMD", "-MF", depfile)]
    return [*without, "-MD", "-MF", depfile]


def is_fresh(log: Path, key: list[str]) -> bool:
    try:
        last = json.loads(log.read_text())
        same = last["key"] == key and "gib" in last
        return same and all(digest(name) == value for name, value in last["files"].items())
    except (OSError, ValueError, KeyError):  # no log, a broken one, or a header that is gone
        return False


def digest(name: str) -> str:
    return hashlib.sha256((ROOT / name).read_bytes()).hexdigest()


def files_read(depfile: str) -> list[str]:
    """The files that a depfile names, relative to ROOT, and through build/links/ what may lie elsewhere next time.

    A compiler may resolve the links (g++ does so where that gives the shorter path), hence the way back.
    """
    links = {os.path.realpath(link): link for link in LINKS.iterdir()}
    words = re.split(r"(?<!\\)\s+", depfile.replace("\\\n", " ").partition(": ")[2].strip())
    names = set()
    for word in words:
        path = os.path.realpath(word.replace("\\ ", " "))
        home = next((home for home in links if path.startswith(f"{home}/")), None)
        if home:
            path = f"{links[home]}{path.removeprefix(home)}"
        names.add(path.removeprefix(f"{ROOT}/"))
    return sorted(names)


if __name__ == "__main__":
    sys.exit(main())
