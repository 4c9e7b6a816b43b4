from dataclasses import replace

import pytest
import torch

from leap.bench.mechanisms import check_definition, make_inputs, mechanisms
from leap.errors import LeapError

ALL = {mechanism.name: mechanism for mechanism in mechanisms(windows=(1, 4, 500))}


def inputs_of(tokens=70, dtype=torch.float32):
    inputs = make_inputs(batch=2, heads=3, tokens=tokens, width=32, seed=1)
    return {name: x.to(dtype) for name, x in inputs.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ALL)
def test_every_mechanism_agrees_with_its_definition(name, dtype):
    check_definition(ALL[name], inputs_of(dtype=dtype))


@pytest.mark.parametrize("name", ALL)
def test_every_mechanism_has_a_baseline_that_sees_as_far_ahead(name):
    baseline = ALL[ALL[name].baseline]
    assert baseline.causal == ALL[name].causal
    assert baseline.baseline == baseline.name


@pytest.mark.parametrize("name", ALL)
def test_a_mechanism_that_sees_other_tokens_is_found_out(name):
    seen_otherwise = replace(ALL[name], causal=not ALL[name].causal)
    with pytest.raises(LeapError, match=f"^{name} disagrees with its definition: the output"):
        check_definition(seen_otherwise, inputs_of())


def test_a_window_too_wide_by_one_is_found_out():
    with pytest.raises(LeapError, match="leap-w4 disagrees"):
        check_definition(replace(ALL["leap-w4"], window=5), inputs_of())


@pytest.mark.parametrize("name", ALL["leapformer"].arguments)
def test_a_wrong_gradient_is_found_out(name):
    right = ALL["leapformer"]
    place = right.arguments.index(name)

    def wrong(*arguments):
        arguments = list(arguments)
        x = arguments[place]
        arguments[place] = x.detach() + 1.01 * (x - x.detach())
        return right.attend(*arguments)

    with pytest.raises(LeapError, match="the gradient is off by"):
        check_definition(replace(right, attend=wrong), inputs_of())


def test_an_answer_that_is_no_number_is_found_out():
    broken = replace(ALL["linear"], attend=lambda q, k, v: v + 0 * (q + k) / 0)
    with pytest.raises(LeapError, match="linear disagrees"):
        check_definition(broken, inputs_of())
