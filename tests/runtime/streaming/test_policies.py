"""When to read and when to write."""

import numpy as np
import pytest

from leap.errors import ConfigError
from leap.runtime.streaming.policies import (
    AlignAtt,
    LocalAgreement,
    TailMass,
    WaitK,
    read_policy,
    waiting,
)
from leap.tasks.simul.paths import wait_schedule


@pytest.mark.parametrize("chunk", [1, 3, 4])
@pytest.mark.parametrize("name", ["wait-1", "wait-3", "wait-2/3"])
def test_what_is_written_in_turn_is_what_the_schedule_to_train_says(name, chunk):
    policy = read_policy(name)
    seen, n_read = [], 0
    while len(seen) < 6:
        n_read += chunk
        while len(seen) < 6 and policy.may_write(n_read, len(seen)):
            seen.append(n_read)
    assert policy.schedule(6, chunk).tolist() == seen


def test_without_a_ratio_states_are_counted_one_by_one():
    assert WaitK(3).may_write(3, 0) and not WaitK(3).may_write(3, 1)


def test_what_is_not_given_is_as_in_the_papers():
    names = [policy().name for policy in (LocalAgreement, AlignAtt, TailMass)]
    assert names == ["agree-2", "align-2", "tail-0.3"]


def test_offline_waits_for_the_end():
    assert not read_policy("offline").may_write(10**6, 0)
    assert waiting("offline", 4).schedule(5, 4) is None is wait_schedule(5, "offline")


@pytest.mark.parametrize(
    "name", ["wait-3/1", "wait-3/4", "offline", "agree-2", "align-2", "tail-0.3"]
)
def test_a_policy_is_called_what_it_is_read_by(name):
    assert read_policy(name, ratio=8).name == name


def test_a_ratio_is_taken_where_the_name_tells_none():
    assert read_policy("wait-3", 4) == read_policy("wait-3/4", 2) == waiting(3, 4)


def test_attention_to_new_chunks_means_to_read_on():
    attention = np.array([[0.1, 0.1, 0.8], [0.1, 0.5, 0.4], [0.4, 0.3, 0.3]])
    assert AlignAtt(1).trusts(attention).tolist() == [True, True, False]
    assert AlignAtt(2).trusts(attention).tolist() == [True, False, False]
    assert TailMass(0.5).trusts(attention[:, :2]).tolist() == [True, False, False]


def test_attention_to_what_is_older_than_the_window_is_trusted():
    older, newer = np.array([[0.01, 0.02, 0.02], [0.6, 0.1, 0.1]])
    for policy in (AlignAtt(1, longest=3), AlignAtt(2, longest=3)):
        assert policy.trusts(np.stack([older, newer])).tolist() == [True, False]


def test_policies_that_look_at_the_model_have_no_more_subwords_than_states():
    for policy in (LocalAgreement(), AlignAtt(), TailMass()):
        assert policy.may_write(3, 2) and not policy.may_write(3, 3)
        with pytest.raises(ConfigError, match="decides as it goes"):
            policy.schedule(5, 1)


@pytest.mark.parametrize(
    ("name", "drafts", "window", "too_new"),
    [
        ("wait-3", 0, 0, 0),
        ("offline", 0, 0, 0),
        ("agree-3", 3, 0, 0),
        ("align-2", 0, 16, 2),
        ("tail-0.3", 0, 2, 2),
    ],
)
def test_a_policy_says_what_it_has_to_know(name, drafts, window, too_new):
    policy = read_policy(name)
    assert (policy.drafts, policy.window, policy.too_new) == (drafts, window, too_new)
    if not window:
        assert policy.trusts(np.array([[0.9], [0.1]])).tolist() == [True, True]


@pytest.mark.parametrize(
    ("kind", "least", "beyond"),
    [
        (WaitK, (1, 1), (0, 1)),
        (WaitK, (1, 1), (1, 0)),
        (LocalAgreement, (2,), (1,)),
        (AlignAtt, (1, 2), (0, 2)),
        (AlignAtt, (1, 2), (2, 2)),
        (TailMass, (1.0, 1), (1.01, 1)),
        (TailMass, (0.01, 1), (0.0, 1)),
        (TailMass, (1.0, 1), (1.0, 0)),
    ],
)
def test_numbers_that_make_no_policy_are_refused(kind, least, beyond):
    kind(*least)
    with pytest.raises(ConfigError):
        kind(*beyond)


@pytest.mark.parametrize("name", ["wait", "wait-0", "agree-1", "tail-1.5", "align-0", "k-3"])
def test_what_is_no_policy_is_refused(name):
    with pytest.raises(ConfigError):
        read_policy(name)
