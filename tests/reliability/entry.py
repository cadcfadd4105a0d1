"""What torchrun starts in the tests: `launch/train.py`, with a strike from the environment in its first attempt."""

import json
import os
import runpy
import signal
import sys
from pathlib import Path

from mpc_dist.training import auto, job
from tests.conftest import ROOT
from tests.reliability.strike import Strike, arm

if __name__ == "__main__":
    phase, rank, place, number = json.loads(os.environ["STRIKE"])
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == str(rank):
        arm([phase], Strike(phase, rank, place, signal.Signals(number)), Path(os.environ["STRIKE_NOTE"]))
        auto.train = job.train
    sys.argv[0] = str(ROOT / "launch" / "train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
