"""Training: the method's schedule, regularisers, objective and loop, and the folder a run lives in."""

from certtool.training.compare import Comparison, Group, Spread, compare_runs
from certtool.training.events import (
    EpochDone,
    Event,
    Finished,
    NextRun,
    Progress,
    RunFailed,
    Started,
    StudyDone,
    StudyEvent,
)
from certtool.training.loop import Trainer, new_run, resumed_run
from certtool.training.run_folder import RUNS, RunFolder
from certtool.training.runs import RunSummary, list_runs
from certtool.training.stop import stop_on_signal
from certtool.training.study import PlannedRun, plan_study, run_study

__all__ = [
    "RUNS",
    "Comparison",
    "EpochDone",
    "Event",
    "Finished",
    "Group",
    "NextRun",
    "PlannedRun",
    "Progress",
    "RunFailed",
    "RunFolder",
    "RunSummary",
    "Spread",
    "Started",
    "StudyDone",
    "StudyEvent",
    "Trainer",
]
__all__ += ["compare_runs", "list_runs", "new_run", "plan_study", "resumed_run", "run_study", "stop_on_signal"]
