"""Training: the method's schedule, regularisers, objective and loop, and the folder a run lives in."""

from certtool.training.events import EpochDone, Event, Finished, Progress, Started
from certtool.training.loop import Trainer, new_run, resumed_run
from certtool.training.run_folder import RUNS, RunFolder
from certtool.training.runs import RunSummary, list_runs
from certtool.training.stop import stop_on_signal

__all__ = [
    "RUNS",
    "EpochDone",
    "Event",
    "Finished",
    "Progress",
    "RunFolder",
    "RunSummary",
    "Started",
    "Trainer",
]
__all__ += ["list_runs", "new_run", "resumed_run", "stop_on_signal"]
