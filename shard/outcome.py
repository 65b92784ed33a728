"""Result of a step as the engine reports it: tokens, finishes, standings, counts and times."""

import logging
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field

from .decoding.strategy import Emitted, Grown, Verdict
from .sequence import Group
from .step import Run

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """What a step did, per group and in all. Tokens are query tokens; keys are those they attend to, each itself and all before
    it."""

    emitted: list[tuple[int, Emitted]] = field(default_factory=list)  # (uid, token)
    # (uid, Group.prompt_scores, Group.prompt_tops) of prompts now complete
    prompts: list[tuple[int, list[float], list[tuple[int, float]]]] = field(default_factory=list)
    found: list[tuple[int, int]] = field(default_factory=list)  # (uid, prompt tokens found in the prefix cache), fresh groups only
    standing: list[tuple[int, int, int, int]] = field(default_factory=list)  # (uid, *Group.standing), only where it changed
    # (uid, scores of the answers) of beam searches that have ended
    scored: list[tuple[int, list[float]]] = field(default_factory=list)
    grown: list[tuple[int, Grown]] = field(default_factory=list)  # (uid, growth of the beams), of searches that are watched
    searched: list[tuple[int, int]] = field(default_factory=list)  # (uid, tokens of each beam) of searches that go on
    failed: list[tuple[int, str]] = field(default_factory=list)  # (uid, reason); these groups are dropped
    seconds: float = 0.0
    mask_seconds: float = 0.0  # time for the grammars' masks, beside the forward
    mask_wait_seconds: float = 0.0  # of it, what the forward did not hide
    prompt_tokens: int = 0
    restored_tokens: int = 0  # of these, tokens that resume preempted groups
    cached_tokens: int = 0  # tokens found in the prefix cache instead
    decode_tokens: int = 0
    drafted: int = 0  # of these, drafts ...
    accepted: int = 0  # ... and those accepted
    drafts: list[tuple[int, int, int]] = field(default_factory=list)  # (uid, drafted, accepted) of groups that had drafts
    tried: list[int] = field(default_factory=list)  # by depth: sequences that had a draft there ...
    kept: list[int] = field(default_factory=list)  # ... and how many of them had one accepted
    draft_seconds: float = 0.0  # time for drafting ...
    later_seconds: float = 0.0  # ... and, of that, runs of the draft model after the first one
    rounds: int = 0  # runs of the draft model
    exhausted: int = 0  # times that memory ran out, so that the step was computed in parts
    prompt_keys: int = 0
    decode_keys: int = 0
    free: int = 0  # free pages at the end of the step
    cached: int = 0
    saved: int = 0  # pages copied to host memory since the last step ended ...
    loaded: int = 0  # ... and copied back
    ahead: bool = False  # the next step was planned before: free pages and what groups lack include it

    def count_prompt(self, run: Run) -> None:
        """Counts the computed part of a prompt."""
        self.prompt_tokens += run.tokens
        self.prompt_keys += run.keys
        self.cached_tokens += run.found
        if not run.group.waiting:
            self.restored_tokens += run.tokens
        elif run.found:
            self.found.append((run.group.uid, run.found))

    def count_decodes(self, runs: Listing[Run]) -> None:
        """Counts decoded tokens, without those computed a second time, which are part of the cost of drafts: the router takes all
        others for sequences."""
        spans = [span for run in runs for span in run.spans]
        self.decode_tokens += sum([span.wanted for span in spans])
        self.decode_keys += sum([span.wanted * (2 * (span.start + len(span.tokens)) - span.wanted + 1) // 2 for span in spans])

    def add(self, group: Group, verdict: Verdict) -> None:
        """Collects what goes to a group's clients."""
        for emitted in verdict.emitted:
            self.emitted.append((group.uid, emitted))
        if verdict.scores is not None:
            self.scored.append((group.uid, verdict.scores))
        if verdict.searched:
            self.searched.append((group.uid, verdict.searched))
        if verdict.grown is not None:
            self.grown.append((group.uid, verdict.grown))

    def count_drafts(self, group: Group, verdict: Verdict) -> None:
        """Counts a group's drafts and which were accepted."""
        self.drafted += verdict.drafted
        self.accepted += verdict.accepted
        self.drafts.append((group.uid, verdict.drafted, verdict.accepted))
        for tried, kept in verdict.trials:
            more = [0] * (tried - len(self.tried))
            self.tried, self.kept = self.tried + more, self.kept + more
            for depth in range(tried):
                self.tried[depth] += 1
                self.kept[depth] += depth < kept

    def fail(self, group: Group, why: str) -> None:
        """Records that the group failed. Logged here too, under the name that other processes' logs and traces use."""
        log.warning("request %s failed: %s", group.trace or group.uid, why)
        self.failed.append((group.uid, why))
