"""Tunings as files, and the one that is in use."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ._measure import Measured

FORMAT = 2
VARIABLE = "FLASH_CUTE_TUNING"


@dataclass(frozen=True)
class Tuning:
    """What `tune` measured on a GPU; `+` joins tunings of the same one, the right one's calls first."""

    gpu: str
    capability: int
    calls: tuple[Measured, ...]

    def __add__(self, other: Tuning) -> Tuning:
        if (other.gpu, other.capability) != (self.gpu, self.capability):
            raise ValueError(f"flash_cute: tuning: expected one of {self.gpu}, got one of {other.gpu}")
        return Tuning(self.gpu, self.capability, self.calls + other.calls)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file for `use_tuning`, or add to the one that is there; a call that is in it is replaced.

        Raises:
            ValueError: the file that is there is of another GPU or version, or no tuning.
        """
        path = Path(path)
        entries: dict[tuple[int, ...], dict[str, Any]] = {}
        if path.exists():
            given = _read(path)
            if given["gpu"] != self.gpu:
                raise ValueError(f"flash_cute: {path}: expected a tuning of {self.gpu} to add to, got {given['gpu']}'s")
            entries = {tuple(entry["call"].values()): entry for entry in given["entries"]}
        for one in self.calls:
            entries[tuple(one.key.values())] = {
                "call": one.key,
                "choice": one.best,
                "microseconds": round(one.seconds[one.best] * 1e6, 2),
                "plan": one.plan,
                "plan_microseconds": round(one.seconds[one.plan] * 1e6, 2),
            }
        facts = {"format": FORMAT, "flash_cute": __version__, "gpu": self.gpu, "capability": self.capability}
        rows = ",\n".join("  " + json.dumps(entry) for entry in entries.values())
        path.write_text(f'{json.dumps(facts)[:-1]}, "entries": [\n{rows}\n]}}\n')

    def __str__(self) -> str:
        """A line per choice, the fastest first."""
        lines = [f"{self.gpu}, flash_cute {__version__}"]
        for one in self.calls:
            gain = "which is the best" if one.best == one.plan else f"the best is {one.gain:.3f} times as fast"
            lines += ["", f"{describe(one.key)}: the plan chooses {one.plan}, {gain}"]
            for name, seconds in sorted(one.seconds.items(), key=lambda item: item[1]):
                marks = [mark for mark, which in (("best", one.best), ("plan", one.plan)) if which == name]
                lines.append(f"  {name:<22}{seconds * 1e6:10.2f} us  {', '.join(marks)}".rstrip())
            lines += [f"  {name:<22}does not run: {reason}" for name, reason in one.failures.items()]
        return "\n".join(lines)


def describe(key: dict[str, int]) -> str:
    """A tuned call in words."""
    dtype = "bfloat16" if key["bfloat16"] else "float16"
    heads = f"{key['heads_q']}/{key['heads_kv']} heads"
    head_dim = f"{key['head_dim']}" + (f"/{key['head_dim_v']}" if key["head_dim_v"] != key["head_dim"] else "")
    unlimited = 1 << 30
    band = (key["band_lower"] > -unlimited, key["band_upper"] < unlimited)
    mask = {(False, False): "full", (False, True): "causal"}.get(band, "window")
    flags = ("packed", "equal_lengths", "deterministic", "softcap", "alibi")
    options = [name.replace("_", " ") for name in flags if key[name]]
    direction = "backward" if key["backward"] else "forward"
    shape = f"batch {key['batch']}, {heads}, {key['len_q']} x {key['len_k']}, head dim {head_dim}"
    return ", ".join([f"{direction} {dtype}", shape, mask, *options])


def gpu_of(device: torch.device) -> tuple[str, int]:
    """The GPU's name and ten times its capability."""
    major, minor = torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_name(device), 10 * major + minor


def use_tuning(path: str | os.PathLike[str] | None) -> None:
    """Make the plan follow a file of `Tuning.save`; `None` unloads it. What was loaded before is replaced.

    A call whose measured entry is in the file, and that names no other backend, runs as the entry says; every other
    call is planned as without a file. `explain` says which it is. Dense calls are matched by their exact shapes; packed
    ones by their numbers of sequences, rows and keys, each rounded up to a power of two, and by everything else
    exactly, whether `max_seqlen_*` say that all are equally long included. It holds for the whole process: all
    threads, autograd and compiled graphs, from their next call on. CUDA graphs replay what they recorded.

    The environment variable FLASH_CUTE_TUNING names a file that is loaded when flash_cute is imported. The GPU is not
    touched then: that it is another one than the file's is said by the first call.

    Args:
        path: a file of `Tuning.save`, made by this version of flash_cute on a GPU of the same name as one of this
            process. Calls on its other GPUs are not affected.

    Raises:
        ValueError: no such file, or it is no tuning, or one of another version or GPU. Nothing changes then.

    Example:
        >>> use_tuning("tuning.json")  # doctest: +SKIP
        >>> use_tuning(None)
    """
    if path is None:
        torch.ops.flash_cute.set_tuning("", 0, "")
        return
    given = _read(Path(path))
    here = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if given["gpu"] not in here:
        shown = ", ".join(dict.fromkeys(here)) or "no GPU"
        raise ValueError(
            f"flash_cute: {path}: expected a tuning of a GPU of this process ({shown}), got {given['gpu']}'s"
        )
    _load(path, given)


def load_from_environment() -> None:
    """Load the file that FLASH_CUTE_TUNING names, if any; its GPU is compared by the first call."""
    path = os.environ.get(VARIABLE)
    if path:
        _load(path, _read(Path(path)))


def _load(path: str | os.PathLike[str], given: dict[str, Any]) -> None:
    rows = []
    for entry in given["entries"]:
        fields = " ".join(f"{name}={value}" for name, value in entry["call"].items())
        rows.append(f"{fields} choice={entry['choice']}")
    try:
        torch.ops.flash_cute.set_tuning(given["gpu"], given["capability"], "\n".join(rows))
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"flash_cute: {path}: {str(error).splitlines()[0].removeprefix('flash_cute: ')}") from None


def _read(path: Path) -> dict[str, Any]:
    """The file's content, checked for all but its GPU and its entries' fields."""
    try:
        given = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"flash_cute: {path}: expected a file of Tuning.save, got {error.strerror}") from None
    except ValueError:
        raise ValueError(f"flash_cute: {path}: expected a file of Tuning.save, got no JSON") from None
    kinds = {"format": int, "flash_cute": str, "gpu": str, "capability": int, "entries": list}
    if not isinstance(given, dict) or any(not isinstance(given.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"flash_cute: {path}: expected a file of Tuning.save, got other JSON")
    if given["format"] != FORMAT or given["flash_cute"] != __version__:
        raise ValueError(
            f"flash_cute: {path}: expected a tuning by flash_cute {__version__}, got one by {given['flash_cute']}; "
            "kernels and rules differ between versions: tune again"
        )
    for entry in given["entries"]:
        well_formed = isinstance(entry, dict) and isinstance(entry.get("call"), dict)
        if not well_formed or not isinstance(entry.get("choice"), str):
            raise ValueError(f"flash_cute: {path}: expected entries of a call and a choice, got {json.dumps(entry)}")
    return given
