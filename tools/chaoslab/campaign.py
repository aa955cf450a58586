"""One job from its start to its end: first calm rounds, then kills; and what is found out about it."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from chaoslab.arena import Arena
from chaoslab.figures.efficiency import Edge, calm_window, last_calm_round, rounds_of
from chaoslab.hunter import Hunter
from chaoslab.job import NAME, Driver, job_file, make_corpus, write_job
from chaoslab.options import Options
from chaoslab.samples import EVERY_S, Samples
from chaoslab.schedule import planned
from chaoslab.watch import Watch

POLL_S = 0.05
STUCK_ROUNDS = 10
"""Rounds' time without a commit after which a run is given up, or `STUCK_S` if that is longer."""
STUCK_S = 240.0
FROZEN_S = 20.0
"""Longest time that a stopped process may outlive the run."""


@dataclass(frozen=True, slots=True)
class CampaignResult:
    """Records of a campaign whose job has ended, from which its figures are computed."""

    run: Path
    corpus: Path
    rounds: int
    """As many as the run should have."""
    watch: Watch
    hunter: Hunter | None
    """None: the calm never ended."""
    samples: Samples
    problems: tuple[str, ...]


def carry_out(options: Options, out: Path) -> CampaignResult:
    """Prepare, start a cluster and the job, strike, and wait for the end."""
    corpus = out / "corpus"
    make_corpus(corpus)
    rounds = rounds_of(options.calm_rounds, options.chaos_rounds)
    job = write_job(out, job_file(out, corpus, options.workers, rounds, options.round_seconds, options.seed))
    with Arena(options.workers) as arena:
        driver = Driver(job, arena.address)
        try:
            campaign = Campaign(options, rounds, arena, driver, Watch(out / NAME))
            campaign.go()
        finally:
            driver.kill()
        campaign.wait_for_the_frozen()
    return CampaignResult(
        run=out / NAME,
        corpus=corpus,
        rounds=rounds,
        watch=campaign.watch,
        hunter=campaign.hunter,
        samples=campaign.samples,
        problems=tuple(campaign.problems),
    )


class Campaign:
    """Watches a job that was started, and strikes once its calm rounds are over.

    Args:
        options: the command line.
        rounds: of the job.
        arena: the cluster.
        driver: the job's process.
        watch: what is seen of it.

    """

    def __init__(self, options: Options, rounds: int, arena: Arena, driver: Driver, watch: Watch) -> None:
        self._options = options
        self._rounds = rounds
        self._arena = arena
        self._driver = driver
        self.watch = watch
        self.hunter: Hunter | None = None
        self.samples = Samples()
        self.problems: list[str] = []
        self._began_s = time.monotonic()
        self._shown_commits = 0
        self._shown_kills = 0

    def go(self) -> None:
        """Return when the job has ended, or doesn't get on."""
        moved_s = sampled_s = time.monotonic()
        while self._driver.exit_code is None:
            now = time.monotonic()
            commits = len(self.watch.commits)
            self.watch.look(now)
            if len(self.watch.commits) > commits:
                moved_s = now
            if now - moved_s > max(STUCK_S, STUCK_ROUNDS * self._options.round_seconds):
                self.problems.append(f"no commit for {now - moved_s:.0f} s")
                return
            self._show_progress(now)
            self._arena.turn(now)
            if len(self.watch.commits) < self._rounds:  # What comes after that, such as the export, is not measured.
                if now - sampled_s >= EVERY_S:
                    self._sample(now)
                    sampled_s = now
                self._hunt(now)
            time.sleep(POLL_S)
        self.watch.look(time.monotonic())
        if self._driver.exit_code != 0:
            self.problems.append(f"exit code {self._driver.exit_code}: {self._driver.last_line()}")

    def wait_for_the_frozen(self) -> None:
        """Ray ends what is left of the run; what is still there after that has been forgotten."""
        deadline = time.monotonic() + FROZEN_S
        while self.hunter is not None:
            frozen = self.hunter.frozen()
            if not frozen:
                return
            if time.monotonic() > deadline:
                self.problems.append(f"stopped and never ended: {', '.join(frozen)}")
                return
            time.sleep(POLL_S)

    def _show_progress(self, now: float) -> None:
        """Print a line at every commit and every strike."""
        kills = [] if self.hunter is None else self.hunter.kills
        commits = len(self.watch.commits)
        if (commits, len(kills)) == (self._shown_commits, self._shown_kills):
            return
        self._shown_commits = commits
        self._shown_kills = len(kills)
        strike = f", strike {len(kills)}: {kills[-1].signal} to {kills[-1].name}" if kills else ""
        line = f"[{now - self._began_s:6.0f} s] round {commits} of {self._rounds}{strike}"
        print(line, file=sys.stderr, flush=True)

    def _hunt(self, now: float) -> None:
        if self.hunter is None and last_calm_round(self._options.calm_rounds) in self.watch.commits:
            self.hunter = self._hunter()
        if self.hunter is not None:
            self.hunter.turn(now)

    def _hunter(self) -> Hunter:
        """The calm is over: its rounds tell how long a round takes."""
        options = self._options
        edges = [Edge(round, at_s, 0) for round, at_s in sorted(self.watch.commits.items())]
        calm = calm_window(edges, options.calm_rounds)
        if calm is None:
            raise RuntimeError("several commits appeared at once: rounds are too short to be watched")
        mean_rounds = options.mean_rounds_between_kills
        strikes = planned(options.seed, options.victims, mean_rounds, calm.round_s, options.signal, options.kills)
        return Hunter(self._arena, self._driver, self.watch, strikes, calm.end_s, patient=options.kills is not None)

    def _sample(self, now: float) -> None:
        pids = {"driver": self._driver.pid, **self._arena.lasting()}
        for actor in self._arena.actors():
            if not actor.name.startswith("worker-"):
                pids[actor.name] = actor.pid
        self.samples.take(now, pids, self._arena.store_bytes())
