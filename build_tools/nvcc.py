"""Runs nvcc on one file and keeps what it said: python nvcc.py LOG.json COMMAND...

The log holds the seconds taken and the compiler's output, `ptxas -v` among it; report.py reads it.
Only what a person should see (warnings, errors) is passed on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

QUIET = ("ptxas info", "    0 bytes stack frame", "nvcc info", "ptxas-info")


def main() -> int:
    log, command = Path(sys.argv[1]), sys.argv[2:]
    start = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds = round(time.monotonic() - start, 1)
    for line in done.stdout.splitlines():
        if not line.startswith(QUIET):
            print(line)
    log.write_text(json.dumps({"seconds": seconds, "output": done.stdout}))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
