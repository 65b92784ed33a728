"""What a step did, in the words of the engine."""

import logging
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field

from .decoding.strategy import Emitted, Grown, Verdict
from .sequence import Group
from .step import Run

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """What a step did, per group and in all. Tokens are query tokens; keys are what these see, each itself and all before it."""

    emitted: list[tuple[int, Emitted]] = field(default_factory=list)  # (uid, token)
    prompts: list[tuple[int, list[float]]] = field(default_factory=list)  # (uid, logprobs) of prompts now complete
    tops: list[list[tuple[int, float]]] = field(default_factory=list)  # of each of these: Group.prompt_tops
    found: list[tuple[int, int]] = field(default_factory=list)  # (uid, tokens of its prompt that were cached), fresh groups only
    standing: list[tuple[int, int, int, int]] = field(default_factory=list)  # (uid, *Group.standing), only where it changed
    scored: list[tuple[int, list[float]]] = field(default_factory=list)  # (uid, scores of the answers) of searches that have ended
    grown: list[tuple[int, Grown]] = field(default_factory=list)  # of those that are watched
    searched: list[tuple[int, int]] = field(default_factory=list)  # (uid, tokens of each beam) of searches that go on
    failed: list[tuple[int, str]] = field(default_factory=list)  # (uid, why); they are gone
    seconds: float = 0.0
    mask_seconds: float = 0.0  # what grammars' masks took, beside the forward
    mask_wait_seconds: float = 0.0  # what of it the forward did not hide
    prompt_tokens: int = 0
    restored_tokens: int = 0  # those of them that restore groups
    cached_tokens: int = 0  # that were found instead
    decode_tokens: int = 0
    drafted: int = 0  # those of them that were guesses ...
    accepted: int = 0  # ... and that stay
    guessed: list[tuple[int, int, int]] = field(default_factory=list)  # (uid, drafted, accepted) of groups that had guesses
    tried: list[int] = field(default_factory=list)  # by depth: sequences that had a guess there ...
    kept: list[int] = field(default_factory=list)  # ... and those of them of which one was right
    draft_seconds: float = 0.0  # what finding guesses took ...
    later_seconds: float = 0.0  # ... and, of that, runs of the draft model after the first one
    rounds: int = 0  # runs of the draft model
    exhausted: int = 0  # times that memory ran out, so that the step was computed in parts
    prompt_keys: int = 0
    decode_keys: int = 0
    free: int = 0  # pages, when it was over
    cached: int = 0
    saved: int = 0  # pages that were copied to the host's memory, since the step before was over ...
    loaded: int = 0  # ... and that came back from there
    ahead: bool = False  # the next step was planned before: what is said of pages and of what groups lack includes it

    def count_prompt(self, run: Run) -> None:
        """What of a prompt is computed."""
        self.prompt_tokens += run.tokens
        self.prompt_keys += run.keys
        self.cached_tokens += run.found
        if not run.group.waiting:
            self.restored_tokens += run.tokens
        elif run.found:
            self.found.append((run.group.uid, run.found))

    def count_decodes(self, runs: Listing[Run]) -> None:
        """Without what is computed once more, which is a part of what guesses cost: the router takes all others for sequences."""
        spans = [span for run in runs for span in run.spans]
        self.decode_tokens, self.decode_keys = sum([span.wanted for span in spans]), sum([span.wanted_keys for span in spans])

    def tell(self, group: Group, verdict: Verdict) -> None:
        """What a group's clients are told."""
        self.emitted += [(group.uid, emitted) for emitted in verdict.emitted]
        if verdict.scores is not None:
            self.scored.append((group.uid, verdict.scores))
        if verdict.searched:
            self.searched.append((group.uid, verdict.searched))
        if verdict.grown is not None:
            self.grown.append((group.uid, verdict.grown))

    def count_guesses(self, group: Group, verdict: Verdict) -> None:
        """What became of a group's guesses."""
        self.drafted += verdict.drafted
        self.accepted += verdict.accepted
        self.guessed.append((group.uid, verdict.drafted, verdict.accepted))
        for tried, kept in verdict.trials:
            more = [0] * (tried - len(self.tried))
            self.tried, self.kept = self.tried + more, self.kept + more
            for depth in range(tried):
                self.tried[depth] += 1
                self.kept[depth] += depth < kept

    def fail(self, group: Group, why: str) -> None:
        """The group is not computed any further. Said here too, by the name under which logs and traces of others know it."""
        log.warning("request %s failed: %s", group.trace or group.uid, why)
        self.failed.append((group.uid, why))
