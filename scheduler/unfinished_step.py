"""What the scheduler keeps of a plan until its result is there, and what it says of it then."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.plan import IterationPlan, MoveCounts, StepResult, StepStats
from scheduler.plan_draft import PlanDraft


@dataclass(frozen=True, slots=True)
class UnfinishedStep:
    """A plan that the executor has, or is about to get."""

    plan: IterationPlan
    draft: PlanDraft
    batch_tokens: int
    max_batch_tokens: int  # that it might have had
    num_preemptions: int  # since the plan before
    plan_s: float

    def stats(self, result: StepResult, num_wasted: int, late: bool, moves: MoveCounts) -> StepStats:
        """What the iteration did."""
        plan, draft = self.plan, self.draft
        return StepStats(
            step=plan.step,
            num_tokens=plan.num_tokens,
            batch_tokens=self.batch_tokens,
            max_batch_tokens=self.max_batch_tokens,
            num_decodes=plan.num_decodes,
            num_prompt_tokens=plan.num_tokens - plan.num_decodes,
            num_wasted_tokens=num_wasted,
            num_preemptions=self.num_preemptions,
            prefix_queries=draft.prefix_queries,
            prefix_hits=draft.prefix_hits,
            late=late,
            plan_s=self.plan_s,
            idle_s=result.idle_s,
            run_s=result.run_s,
            cpu_hits=draft.cpu_hits,
            ssd_hits=draft.ssd_hits,
            moves=moves,
            overlapped=result.overlapped,
            unmeasured=result.unmeasured,
        )
