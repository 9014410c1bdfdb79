"""A progress bar for the commands."""

import sys
import time


class Progress:
    """A bar on stderr for what takes longer than a second; nothing where stderr is not a terminal."""

    WIDTH = 30

    def __init__(self, title: str, steps: int) -> None:
        self.title, self.steps, self.done = title, steps, 0
        self.visible = sys.stderr.isatty()
        self.start = time.monotonic()

    def __call__(self) -> None:
        self.done += 1
        elapsed = time.monotonic() - self.start
        if not self.visible or elapsed < 1:
            return
        filled = self.WIDTH * self.done // self.steps
        left = elapsed / self.done * (self.steps - self.done)
        bar = "#" * filled + "." * (self.WIDTH - filled)
        print(
            f"\r{self.title} [{bar}] {self.done}/{self.steps}, {left:.0f} s left ", end="", file=sys.stderr, flush=True
        )

    def close(self) -> None:
        if self.visible:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
