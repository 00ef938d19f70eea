"""The laws of an optimizer step: it does not depend on its cut, and its loss is a sum divided once by a count."""

import copy
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import micronorm as mn
from micronorm.engine.sampling import MicroBatch, StepInputs
from micronorm.nn.per_step.shared_weights import SharedWeights
from tests.devices import require_kernels
from tests.engine.tasks import Dropping, Sum, Toy, make_step, step_inputs
from tests.networks import SmallResNet, assert_same_state
from tests.tolerances import assert_close_to_max, tolerance

ONE_STEP = tolerance("one_step", torch.float64)
TASK = Toy()
ALL = step_inputs(TASK, torch.arange(24))


def stepped(model, size, task=TASK, chosen=ALL, *, cut=None, **options):
    """A copy of the model after one step, and what the step came to."""
    step = make_step(copy.deepcopy(model), task, size, **options)
    step.micro_batch = cut or step.micro_batch
    result = step(chosen)
    return step.model.state_dict(), dict(zip(result.names, result.sums.tolist(), strict=True))


def by_hand(model, chosen=ALL, lr=0.02):
    """The same step in the fewest words: forward, mean loss, backward, step."""
    model = copy.deepcopy(model).double().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-2)
    F.cross_entropy(model(chosen.batch[0]), chosen.batch[1]).backward()
    optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("size", [1, 3, 8, 24, 32])
@pytest.mark.parametrize("norm", [mn.BCN(groups=4), mn.GN(groups=4), mn.FRN()], ids=lambda norm: type(norm).__name__)
def test_a_step_is_the_plain_one_however_it_is_cut(norm, size):
    model = SmallResNet(norm, mn.WS())
    state, sums = stepped(model, size)
    assert_same_state(state, by_hand(model), tol=ONE_STEP)
    assert sums["count"] == 24


def test_a_step_with_keyed_dropout_does_not_depend_on_its_cut():
    model = Dropping()
    whole, sums = stepped(model, 24)
    for size in (1, 5, 23):
        state, others = stepped(model, size)
        assert_same_state(state, whole, tol=ONE_STEP)
        assert others == pytest.approx(sums, rel=1e-12)


class Uneven(MicroBatch):
    """Pieces of any sizes, which a step must not mind."""

    def __init__(self, sizes):
        super().__init__(max(sizes))
        self.ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]

    def pieces(self, samples):
        ends = [end for end in self.ends if end < samples] + [samples]
        return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]


@settings(max_examples=10)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_a_step_does_not_depend_on_how_unevenly_it_is_cut(sizes):
    torch.manual_seed(0)
    model = Dropping()
    state, _ = stepped(model, 24, cut=Uneven(sizes))
    assert_same_state(state, stepped(model, 24)[0], tol=ONE_STEP)


class Masked(Toy):
    """A loss over places, of which a sample has some, many or none: the count is a tensor."""

    def loss(self, model, batch):
        images, labels = batch
        places = (labels - 1).clamp(0)  # 0, 0, 1, 2, 3
        each = F.cross_entropy(model(images), labels, reduction="none")
        return Sum((each * places).sum(), places.sum(), {"wrong": torch.zeros(())})


@pytest.mark.parametrize("size", [1, 3, 24])
def test_the_sum_is_divided_once_by_the_count_of_the_whole_step(size):
    model = SmallResNet(mn.BCN(groups=4), mn.WS())
    state, sums = stepped(model, size, Masked())
    places = (ALL.batch[1] - 1).clamp(0)
    assert len(places.unique()) == 4
    assert sums["count"] == places.sum()
    expected = copy.deepcopy(model).double().train()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-2)
    each = F.cross_entropy(expected(ALL.batch[0]), ALL.batch[1], reduction="none")
    ((each * places).sum() / places.sum()).backward()
    optimizer.step()
    assert_same_state(state, expected.state_dict(), tol=ONE_STEP)


def test_a_step_that_counts_nothing_divides_by_nothing():
    chosen = step_inputs(TASK, torch.where(TASK.train.labels < 2)[0])
    model = SmallResNet()
    state, sums = stepped(model, 3, Masked(), chosen)
    assert sums["count"] == sums["loss"] == 0
    decayed = 1 - 0.02 * 1e-2
    for name, value in model.double().named_parameters():
        assert_close_to_max(state[name], value * decayed, tol=1e-15)  # nothing but the optimizer's own


@pytest.mark.parametrize("norm", [mn.BN(), mn.BN(micro_batch=8)], ids=["BN", "ghost"])
def test_statistics_over_a_unit_of_samples_are_those_of_a_loop_over_units(norm):
    torch.manual_seed(0)
    model = SmallResNet(norm)
    largest = 8 if norm.micro_batch is None else None
    state, _ = stepped(model, 24, unit=8, largest=largest)
    reference = SmallResNet(mn.BN())
    reference.load_state_dict(model.state_dict())
    reference = reference.double().train()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-2)
    for part in (slice(0, 8), slice(8, 16), slice(16, 24)):
        (F.cross_entropy(reference(ALL.batch[0][part]), ALL.batch[1][part], reduction="sum") / 24).backward()
    optimizer.step()
    assert_same_state(state, reference.state_dict(), tol=ONE_STEP)
    assert state["norm.num_batches_tracked"] == 3


def test_parameters_that_no_sample_reached_are_left_alone():
    model = SmallResNet()
    model.spare = nn.Linear(3, 3)
    state, _ = stepped(model, 8)
    assert torch.equal(state["spare.weight"], model.spare.weight.double())  # an optimizer that saw zeros would decay it
    assert not torch.equal(state["head.weight"], model.head.weight.double())


def test_frozen_parameters_stay():
    model = SmallResNet(weight=mn.WS())
    model.block1.requires_grad_(False)
    state, _ = stepped(model, 5)
    for name, value in model.double().state_dict().items():
        assert torch.equal(state[name], value) == name.startswith("block1."), name


def test_columns_may_be_lists_tuples_and_dictionaries():
    class Columns(Toy):
        def loss(self, model, batch):
            images, extra, (labels,) = batch
            assert isinstance(extra, list)
            assert all(e["box"].dtype == torch.float64 and e["name"] == "x" for e in extra)
            return super().loss(model, (images, labels))

    class Transposed(tuple):
        """A tuple of columns that is cut by sample."""

        def __getitem__(self, part):
            return tuple(column[part] for column in self)

    images, labels = ALL.batch
    extra = [{"box": torch.ones(4, dtype=torch.float32), "name": "x"} for _ in labels]
    chosen = StepInputs((images, extra, Transposed([labels])), ALL.keys, 24, 24)
    state, _ = stepped(model := SmallResNet(), 7, Columns(), chosen)
    assert_same_state(state, by_hand(model), tol=ONE_STEP)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_compute_a_step_under_autocast_and_keep_parameters_in_float32(dtype):
    model = SmallResNet(mn.BCN(groups=4), mn.WS())
    half, sums = stepped(model, 8, dtype=dtype)
    expected = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-2)
    for part in (slice(0, 8), slice(8, 16), slice(16, 24)):
        with torch.autocast("cpu", dtype):
            logits = expected(ALL.batch[0][part].float())
        (2**11 * F.cross_entropy(logits.float(), ALL.batch[1][part], reduction="sum")).backward()
    for parameter in expected.parameters():
        parameter.grad /= 2**11 * 24
    optimizer.step()
    assert {value.dtype for value in half.values()} == {torch.float32}
    assert_same_state(half, expected.state_dict(), tol=tolerance("one_step", torch.float32))

    exact, others = stepped(model, 8, dtype=torch.float32)
    eps = torch.finfo(dtype).eps
    assert sums["loss"] == pytest.approx(others["loss"], rel=eps)
    moves = [torch.cat([(s[name] - p).flatten() for name, p in model.named_parameters()]) for s in (half, exact)]
    # Ten layers round, and some rectifiers open that were closed: measured 9 to 20 eps, and once 60.
    assert 0 < (moves[0] - moves[1]).norm() < 32 * eps * moves[1].norm()


def test_float16_skips_a_step_that_overflows_and_lowers_its_scale():
    class Overflowing(Toy):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            return Sum(loss.sum * float("inf"), loss.count, loss.counts)

    step = make_step(model := SmallResNet(), Overflowing(), 8, dtype=torch.float16)
    before, scale = copy.deepcopy(model.state_dict()), step.scaler.get_scale()
    assert scale == 2**16 / 32
    step(ALL)
    assert step.scaler.get_scale() == scale / 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_channels_last_changes_nothing_beyond_rounding():
    model = SmallResNet(mn.BCN(groups=4), mn.WS())
    nhwc = copy.deepcopy(model).to(memory_format=torch.channels_last)
    state, _ = stepped(nhwc, 8, channels_last=True)
    assert_same_state(state, by_hand(model), tol=ONE_STEP)


def test_a_count_that_the_first_step_did_not_have_is_refused_and_the_step_taken_back():
    class Late(Toy):
        late = False

        def loss(self, model, batch):
            loss = super().loss(model, batch)
            return Sum(loss.sum, loss.count, {**loss.counts, "seen": torch.ones(())}) if self.late else loss

    task = Late()
    step = make_step(SmallResNet(), task, 24)
    step(ALL)
    before = copy.deepcopy(step.model.state_dict())
    task.late = True
    with pytest.raises(ValueError, match="counts seen, which the first step did not"):
        step(ALL)
    assert_same_state(step.model.state_dict(), before, tol=0.0)


def test_named_tuples_stay_what_they_are():
    class Pair(NamedTuple):
        image: torch.Tensor
        name: str

    placed = make_step(SmallResNet(), TASK, 24).place([Pair(torch.ones(2), "x")])
    assert isinstance(placed[0], Pair)
    assert placed[0].image.dtype == torch.float64


@pytest.mark.parametrize(
    "dtype, size, expected",
    [
        (torch.bfloat16, 24, torch.bfloat16),
        (torch.bfloat16, 12, None),  # gradients are summed over two micro-batches, in float32
        (torch.float64, 24, None),
        (torch.float64, 7, None),
    ],
)
def test_weights_of_one_launch_have_the_compute_dtype_where_no_gradients_are_summed(dtype, size, expected, monkeypatch):
    require_kernels("cpu")
    model = SmallResNet(mn.BCN(groups=4), mn.WS())
    for module in model.modules():
        if isinstance(module, mn.nn.WSConv2d):
            module.backend = "triton"
    asked, shared = [], SharedWeights.shared
    monkeypatch.setattr(
        SharedWeights, "shared", lambda self, **options: asked.append(options) or shared(self, **options)
    )
    state, _ = stepped(model, size, dtype=dtype)
    assert asked == [{"dtype": expected}]
    if dtype == torch.float64:
        assert_same_state(state, by_hand(model), tol=ONE_STEP)
