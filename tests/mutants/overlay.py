"""A copy of the project in a temporary folder, in which faults are planted; the working tree is never touched.

Every process of a test finds the copy: it is the working folder, the first on PYTHONPATH, and where the tests are.
"""

import compileall
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from py_compile import PycInvalidationMode

from tests.mutants import tracer

OWN_ROOT = Path(__file__).resolve().parents[2]
"""Where this tool is; the project that is mutated may be another."""
_START_TRACING = """import sys
from pathlib import Path

if (Path(__file__).parent / {context!r}).exists():
    sys.path.insert(0, str(Path(__file__).parent))
    from tests.mutants.tracer import start

    start(Path(__file__).parent)
    sys.path.pop(0)
"""


class Overlay:
    """One copy."""

    def __init__(self, root: Path, folder: Path, sources: Sequence[str]) -> None:
        self.folder = folder
        self._root = root
        self._sources = sources
        for name in list_files(root):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target)
        # Compiled files that are checked by content: a fault of the same length, a moment later, is seen.
        for package in {Path(source).parts[0] for source in sources}:
            compileall.compile_dir(folder / package, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        (folder / "sitecustomize.py").write_text(_START_TRACING.format(context=tracer.CONTEXT))
        (folder / "tmp").mkdir()

    def environment(self) -> dict[str, str]:
        """For the processes that run tests here."""
        data = os.environ.get("MPC_DIST_DATA", str(self._root.parent / "shared" / "data"))
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(OWN_ROOT)]),
            "MPC_DIST_DATA": data,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder / "tmp"),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        }

    @contextmanager
    def planted(self, path: str, text: str) -> Iterator[None]:
        """Inside, that file has another text."""
        before = (self.folder / path).read_text()
        (self.folder / path).write_text(text)
        try:
            yield
        finally:
            (self.folder / path).write_text(before)

    @contextmanager
    def traced(self) -> Iterator[Path]:
        """Inside, processes write down which lines they run, into the file that is given."""
        lines = self.folder / tracer.LINES
        (self.folder / "trace-sources").write_text("\n".join(self._sources))
        (self.folder / tracer.CONTEXT).write_text("")
        lines.write_text("")
        try:
            yield lines
        finally:
            (self.folder / tracer.CONTEXT).unlink()
            lines.unlink()

    def tidy(self) -> None:
        """Remove what tests left."""
        shutil.rmtree(self.folder / "tmp", ignore_errors=True)
        (self.folder / "tmp").mkdir(exist_ok=True)


def list_files(root: Path) -> list[str]:
    """The project's files that are there: known to git, or new and not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if not (root / ".git").exists():
        return [str(path.relative_to(root)) for path in sorted(root.rglob("*")) if path.is_file()]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True, timeout=60).stdout
    return [name for name in listed.split("\0") if name and (root / name).is_file()]
