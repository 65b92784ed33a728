"""Reading a step's reply: its flat lists are divided among the requests, choices and rows that they belong to."""

from penstock.proto import shard_pb2
from penstock.router.replies import prompt_logprobs, report_of, scores_of, tops
from penstock.router.scheduler import Report


def test_scheduler_report_has_every_number_of_the_reply() -> None:
    lists = {"held": [3, 4], "grow": [5, 6], "lacking": [7, 0]}
    numbers = {
        name: number
        for number, name in enumerate(
            (
                "free",
                "cached",
                "prompt_tokens",
                "cached_tokens",
                "decode_tokens",
                "prompt_keys",
                "decode_keys",
                "rounds",
                "draft_seconds",
                "later_seconds",
                "seconds",
            ),
            10,
        )
    }
    step = shard_pb2.StepReply(
        held_uids=[1, 2],
        failed_uids=[8],
        failed_messages=["lost"],
        tokens=[65] * 5,
        drafted_tokens=6,
        accepted_tokens=4,
        ahead=True,
        **lists,
        **numbers,
    )
    expected = Report(uids=[1, 2], failed=[8], finished=[9], rows=7, drafted=6, accepted=4, ahead=True, **lists, **numbers)  # type: ignore[arg-type]
    assert report_of(step, [9]) == expected


def test_prompt_logprobs_are_divided_among_the_requests() -> None:
    step = shard_pb2.StepReply(
        prompt_uids=[5, 6, 7],
        prompt_counts=[2, 0, 1],
        prompt_tops=[2, 2, 1],
        prompt_logprobs=[-1.0, -2.0, -3.0],
        prompt_top_ids=[10, 11, 12, 13, 14],
        prompt_top_logprobs=[-0.5, -1.5, -2.5, -3.5, -4.5],
    )
    assert prompt_logprobs(step) == {
        5: ((None, -1.0, -2.0), ((10, -0.5), (11, -1.5), (12, -2.5), (13, -3.5))),
        6: ((None,), ()),
        7: ((None, -3.0), ((14, -4.5),)),
    }


def test_top_alternatives_are_divided_among_the_rows() -> None:
    rows = {"uids": [1, 2, 3], "tokens": [65, 66, 67]}
    step = shard_pb2.StepReply(top_counts=[2, 0, 1], top_ids=[10, 11, 12], top_logprobs=[-0.5, -1.5, -2.5], **rows)
    assert list(tops(step)) == [((10, -0.5), (11, -1.5)), (), ((12, -2.5),)]
    assert list(tops(shard_pb2.StepReply(**rows))) == [()] * 3


def test_beam_scores_are_divided_among_requests_and_choices() -> None:
    step = shard_pb2.StepReply(scored_uids=[5, 6, 7], scored_counts=[2, 0, 1], scores=[-1.0, -2.0, -3.0])
    assert scores_of(step) == {(5, 0): -1.0, (5, 1): -2.0, (7, 0): -3.0}
