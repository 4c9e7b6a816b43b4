"""What an op is given is refused by name, with what would work."""

import pytest
import torch

from leap.errors import InputError
from leap.ops.checks import check_axes, check_floating, check_key_mask, check_same


def test_numbers_must_be_floating_point():
    check_floating(q=torch.ones(1), k=None)
    with pytest.raises(InputError, match=r"k has dtype torch.int64; .* say k.float\(\)"):
        check_floating(q=torch.ones(1), k=torch.ones(1, dtype=torch.long))


def test_axes_are_counted():
    check_axes("b h t", p=torch.ones(2, 3, 4), s=None)
    for wrong in (torch.ones(2, 3), torch.ones(2, 3, 4, 5)):
        with pytest.raises(InputError, match=r"s is \[2, 3.*; expected axes \[b, h, t\]"):
            check_axes("b h t", p=torch.ones(2, 3, 4), s=wrong)


def test_axes_that_are_named_must_agree_and_others_are_free():
    q, k = torch.ones(2, 3, 4, 5), torch.ones(2, 3, 9, 5)
    check_same("b h * f", q=q, k=k, x=None)
    with pytest.raises(InputError, match=r"q is .* and k is .* differ in axis 2 \(t\)"):
        check_same("b h t f", q=q, k=k)
    with pytest.raises(InputError, match=r"axis 3 \(f\)"):
        check_same("b h * f", q=q, x=None, k=k[..., :4])


def test_a_mask_says_of_each_token_whether_it_is_real():
    k = torch.ones(2, 3, 4, 5)
    check_key_mask(None, k)
    check_key_mask(torch.ones(2, 4, dtype=torch.bool), k)
    with pytest.raises(InputError, match=r"dtype torch.int64; .* attention_mask.bool\(\)"):
        check_key_mask(torch.ones(2, 4, dtype=torch.long), k)
    for axes in ((2, 5), (1, 4), (4,)):
        with pytest.raises(InputError, match=r"with source \[2, 3, 4, 5\] it must be \[2, 4\]"):
            check_key_mask(torch.ones(axes, dtype=torch.bool), k, "source")
