"""Fixtures that several test modules share."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

# Deterministic examples and no deadline: a slow shared machine must not fail a test.
settings.register_profile("mpc_dist", deadline=None, derandomize=True, database=None)
settings.load_profile("mpc_dist")


@pytest.fixture
def float64() -> Iterator[None]:
    """New tensors and weights are float64, so that comparisons can be tight."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data beside the project (or in MPC_DIST_DATA)."""
    folder = Path(os.environ.get("MPC_DIST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("no real data beside the project; set MPC_DIST_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def cifar(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the CIFAR-10 and CIFAR-100 subsets in their standard python-version layout."""
    out = tmp_path_factory.mktemp("cifar")
    subprocess.run(
        [sys.executable, str(real_data / "unpack.py"), str(out)], check=True, timeout=120, capture_output=True
    )
    return out
