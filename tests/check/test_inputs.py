"""What `check_cuts` refuses, and with which words."""

import numpy as np
import pytest
import torch
from torch import nn

import micronorm as mn
from tests.check.parts import Net, images, summed


class _Evaluating(Net):
    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.eval()


def _frozen() -> nn.Module:
    return Net(nn.Identity()).requires_grad_(False)


BATCH = images()
BAD = {
    "no tuple": (Net, BATCH[0], summed, TypeError, r"tuple of tensors or lists.*\(images,\)"),
    "nothing": (Net, (), summed, ValueError, "empty tuple"),
    "an array": (Net, (np.zeros((4, 3)),), summed, TypeError, r"batch\[0\] is a ndarray"),
    "a scalar": (Net, (torch.tensor(1.0),), summed, ValueError, "without axes"),
    "one sample": (Net, images(1), summed, ValueError, "at least 2 samples, got 1"),
    "no sample": (Net, images(0), summed, ValueError, "at least 2 samples, got 0"),
    "unequal lengths": (Net, (BATCH[0], BATCH[1][:3]), summed, ValueError, r"lengths \[6, 3\]"),
    "no model": (lambda _: lambda x: x, BATCH, summed, TypeError, "Module is needed, got function"),
    "no loss": (Net, BATCH, None, TypeError, "callable as loss"),
    "eval mode": (lambda _: _Evaluating(), BATCH, summed, ValueError, r"call model.train\(\)"),
    "nothing to train": (lambda _: _frozen(), BATCH, summed, ValueError, "requires grad"),
    "a lazy layer": (lambda _: nn.LazyLinear(5), BATCH, summed, ValueError, "run one forward first"),
    "meta tensors": (lambda _: nn.Linear(3, 5, device="meta"), BATCH, summed, ValueError, "meta"),
    "a float": (Net, BATCH, lambda m, p: summed(m, p)[0].item(), TypeError, "got float"),
    "a vector": (Net, BATCH, lambda m, p: m(p[0]).sum(1), ValueError, r"shape \(6,\); use .sum\(\)"),
    "a triple": (Net, BATCH, lambda m, p: (*summed(m, p), 1), ValueError, "got 3 values"),
    "two terms": (Net, BATCH, lambda m, p: (m(p[0]).sum(), None), TypeError, "number as count"),
    "a detached loss": (Net, BATCH, lambda m, p: summed(m, p)[0].detach(), ValueError, "no gradient"),
    "a count of zero": (Net, BATCH, lambda m, p: (summed(m, p)[0], 0), ValueError, "add up to 0"),
}


@pytest.mark.parametrize("make, batch, loss, kind, message", BAD.values(), ids=BAD.keys())
def test_bad_input_raises_with_the_invariant_and_the_way_out(make, batch, loss, kind, message):
    with pytest.raises(kind, match=message):
        mn.check_cuts(make(nn.Identity()), batch, loss)


def test_a_loss_that_uses_another_model_is_refused():
    outside = Net(nn.Identity()).double()
    with pytest.raises(ValueError, match="first argument"):
        mn.check_cuts(Net(nn.Identity()), images(), lambda m, p: summed(outside, p))


def test_wrappers_are_refused_by_name():
    model = Net(nn.Identity())
    with pytest.raises(ValueError, match=r"DataParallel: pass model\.module"):
        mn.check_cuts(nn.DataParallel(model), images(), summed)

    # The real ones need a process group, and seconds to import the compiler.
    for name, advice in (("DistributedDataParallel", "pass model.module"), ("OptimizedModule", "pass model._orig_mod")):
        with pytest.raises(ValueError, match=f"{name}: {advice}"):
            mn.check_cuts(type(name, (Net,), {})(nn.Identity()), images(), summed)


def test_a_model_that_cannot_be_copied_is_refused_with_the_usual_reason():
    model = Net(nn.Identity())
    model.kept = model.head(torch.randn(2, 8))
    with pytest.raises(ValueError, match="detach or delete it"):
        mn.check_cuts(model, images(), summed)


def test_an_error_of_the_users_own_code_comes_through():
    def loss(model, part):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        mn.check_cuts(Net(nn.Identity()), images(), loss)
    assert "float64" in caught.value.__notes__[0]


def test_a_loss_of_outputs_and_labels_is_told_how_it_is_called():
    with pytest.raises(TypeError, match="cross_entropy") as caught:
        mn.check_cuts(Net(nn.Identity()), images(), nn.functional.cross_entropy)
    assert any("called loss(model, part)" in note for note in caught.value.__notes__)
