"Builds as build.ipynb plans and runs them."

from typing import Any

from leakmel.core.operation import Run, make
from leakmel.dataset.publish import BuildResult
from leakmel.operations.data import Build, BuildPlan


def plan_run(parameters: dict[str, Any], progress: str = "none") -> BuildPlan:
    plan: BuildPlan = make(Build, parameters).plan(Run(progress, keeps=True))
    return plan


def execute(plan: BuildPlan, progress: str = "none") -> list[BuildResult]:
    results: list[BuildResult] = make(Build, {}).execute(plan, Run(progress, keeps=True)).result
    return results
