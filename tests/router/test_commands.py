"""Commands to the shards: how a request becomes a `Group` message."""

from penstock.proto import shard_pb2
from penstock.router.commands import group
from penstock.router.request import Request, Sampling, Thinking


def test_neutral_sampling_settings_are_not_sent() -> None:
    request = Request(prompt=(5, 6), max_new_tokens=3, end_ids=(2,))
    assert group(9, request) == shard_pb2.Group(uid=9, tokens=[5, 6], max_new_tokens=3, end_ids=[2], sampling=shard_pb2.Sampling())


def test_resumed_group_has_continuations_and_no_prompt_logprobs() -> None:
    request = Request(prompt=(5, 6), max_new_tokens=3, choices=4, prompt_logprobs=True)
    assert (group(9, request).choices, group(9, request).prompt_logprobs) == (4, True)
    resumed = group(9, request, [shard_pb2.Continuation(choice=2, tokens=[7])])
    assert (resumed.continuations[0].choice, resumed.prompt_logprobs) == (2, False), "they were told before it was paused"


def test_every_sampling_setting_is_sent() -> None:
    sampling = Sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        typical_p=0.75,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias=((4, 2.0), (5, -2.0)),
        seed=2**64 - 1,
        final_logprobs=True,
    )
    sent = group(1, Request(prompt=(1,), max_new_tokens=1, sampling=sampling, top_n=4, prompt_logprobs=True))
    assert (sent.top_n, sent.prompt_logprobs) == (4, True)
    assert sent.sampling == shard_pb2.Sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        typical_p=0.75,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        bias_ids=[4, 5],
        bias_values=[2.0, -2.0],
        seed=2**64 - 1,
        final_logprobs=True,
    )


def test_thinking_budget_is_sent() -> None:
    for begin in (None, 0, 8):
        sent = group(1, Request(prompt=(1,), max_new_tokens=1, thinking=Thinking(3, 7, begin)))
        assert sent.thinking == shard_pb2.Thinking(most=3, end=7, begin=begin)
        assert sent.thinking.HasField("begin") == (begin is not None)
