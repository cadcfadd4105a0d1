"""Which mutants are run: as many per file as it deserves by the number that it has, drawn by a seed."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutants.mutate import Mutant, find_mutants

SOURCES = ("mpc_dist/gradient.py", "mpc_dist/windows.py", "mpc_dist/schedule", "mpc_dist/runtime", "mpc_dist/training")


def list_sources(root: Path, names: Sequence[str] = SOURCES) -> list[str]:
    """The files of these files and folders."""
    found = []
    for name in names:
        path = root / name
        if not path.exists():
            raise ValueError(f"there is no {name} to mutate; name a file or folder below {root}")
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        found += [str(file.relative_to(root)) for file in files]
    return found


def choose_mutants(root: Path, sources: Sequence[str], *, number: int, seed: int) -> list[Mutant]:
    """A draw that depends on content alone: lines that move, and files that change, leave the others' draw alone."""
    candidates = {source: find_mutants(source, (root / source).read_text()) for source in sources}
    quotas = share_out(number, {source: len(found) for source, found in candidates.items()})
    return [
        mutant
        for source, found in candidates.items()
        for mutant in sorted(found, key=lambda mutant: _draw(seed, mutant))[: quotas[source]]
    ]


def share_out(number: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """`number` in proportion to the sizes, by largest remainders, never more than there are."""
    total = sum(sizes.values())
    number = min(number, total)
    exact = {name: number * size / max(total, 1) for name, size in sizes.items()}
    shares = {name: math.floor(share) for name, share in exact.items()}
    rest = sorted(exact, key=lambda name: (shares[name] - exact[name], name))
    for name in rest[: number - sum(shares.values())]:
        shares[name] += 1
    return shares


def _draw(seed: int, mutant: Mutant) -> str:
    return hashlib.sha256(f"{seed} {mutant.key}".encode()).hexdigest()
