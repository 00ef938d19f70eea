"""A run takes every sample of every epoch once, at the rate of its step, whatever computes it."""

import copy
import random

import numpy
import pytest
import torch
from hypothesis import assume, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from torch import nn

import micronorm as mn
from micronorm import records
from micronorm.engine.loop import Diverged, _TrainingRun, train
from micronorm.engine.optimization import SGD, Cosine, ParameterGroup, Poly
from micronorm.engine.parallel import OneRank
from micronorm.engine.sampling import Sampler
from micronorm.engine.settings import Execution
from micronorm.engine.task import Listener
from tests.engine.ranks import Rows
from tests.engine.tasks import CPU, Dropping, Sum, Toy, Zoo, settings
from tests.networks import SmallResNet, assert_same_state
from tests.tolerances import tolerance

HERE = Execution(device=CPU)


class Listening(Rows):
    """Keeps messages too."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def on_message(self, text):
        self.messages.append(text)


def run_of(samples, *, execution=HERE, **changes):
    return _TrainingRun(nn.Linear(1, 1), Toy(samples), settings(**changes), execution, None, Listener())


def sampler_of(samples, *, rank=0, world=1, **changes):
    """The sampler of one of several ranks; nothing here speaks to the others."""
    parallel = OneRank(CPU)
    parallel.rank, parallel.world = rank, world
    return Sampler(ReadAhead(samples), settings(**changes), parallel)


class ReadAhead:
    """Samples that are their own indices, of which all shares are read ahead."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def load(self, shares, *, seed):
        yield from [(indices,) for _, indices in shares]


@profile(max_examples=25)
@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 5), st.integers(1, 8), st.data())
def test_every_epoch_takes_every_sample_once_over_all_ranks(samples, step_batch, world, unit, data):
    assume(unit <= step_batch)
    done = data.draw(st.integers(0, -(-samples // step_batch)))  # resumed in mid-epoch
    taken = {0: [], 1: []}
    for rank in range(world):
        sampler = sampler_of(samples, rank=rank, world=world, step_batch=step_batch, unit=unit, epochs=2)
        for epoch, inputs in sampler.load(done, 2 * -(-samples // step_batch)):
            (indices,) = inputs.batch
            assert len(indices) == len(inputs.keys) == max(inputs.own_samples, 1)
            taken[epoch] += indices[: inputs.own_samples].tolist()
    assert sorted(taken[1]) == list(range(samples))
    assert len(taken[0]) == len(set(taken[0])) == max(samples - done * step_batch, 0)


def test_epochs_come_in_different_orders_and_seeds_too():
    def orders(**changes):
        return [inputs.batch[0].tolist() for _, inputs in sampler_of(20, step_batch=20, **changes).load(0, 2)]

    first, second = orders()
    assert first != second != orders(seed=1)[1]
    assert orders() == [first, second]


def test_the_samples_of_a_step_are_ordered_by_aspect_ratio_and_stay_the_same_samples():
    def load(aspect_ratios):
        sampler = sampler_of(20, step_batch=8)
        sampler._aspect_ratios = aspect_ratios
        return [inputs.batch[0].tolist() for _, inputs in sampler.load(0, 3)]

    ratios = torch.arange(20) % 3
    drawn, ordered = load(None), load(ratios)
    assert ordered == [sorted(step, key=lambda index: index % 3) for step in drawn]  # both orders are stable


def test_the_order_by_aspect_ratio_does_not_change_the_result_of_a_run():
    drawn, plain, sorted_by_ratio = SmallResNet(), Toy(24), Toy(24)
    ordered = copy.deepcopy(drawn)
    sorted_by_ratio.train.aspect_ratios = torch.arange(24) % 5
    for model, task in ((drawn, plain), (ordered, sorted_by_ratio)):
        train(model, task, settings(epochs=2), Execution(device=CPU, micro_batch=3))
    assert plain.train.asked != sorted_by_ratio.train.asked
    assert_same_state(ordered.state_dict(), drawn.state_dict(), tol=tolerance("fifty_steps", torch.float64))


def test_a_run_begins_with_micro_batches_of_the_largest_share():
    assert run_of(20, step_batch=10, unit=4).step.micro_batch.size == 12  # three units, the last one not full
    assert run_of(20, step_batch=10, unit=4, largest=4).step.micro_batch.size == 4
    assert run_of(20, step_batch=10, execution=Execution(device=CPU, micro_batch=3)).step.micro_batch.size == 3


def test_each_step_is_taken_at_the_rate_of_the_schedule():
    rows, schedule = Rows(), Cosine(1)
    chosen = settings(epochs=2, optimizer=SGD(0.5), schedule=schedule)
    train(SmallResNet(), Toy(24), chosen, HERE, listener=rows)
    expected = [0.5 * schedule.factor(k, steps_per_epoch=3, total_steps=6) for k in range(6)]
    assert [row["lr"] for row in rows.steps] == expected
    assert [row["step"] for row in rows.steps] == [1, 2, 3, 4, 5, 6]
    assert [(row["epoch"], "test" in row) for row in rows.epochs] == [(0, True), (1, True)]


def test_a_run_may_stop_early_and_evaluate_seldom():
    rows = Rows()
    outcome = train(SmallResNet(), Toy(24), settings(epochs=4), Execution(device=CPU, evaluate_epochs=3), listener=rows)
    assert outcome.finished
    assert [row["epoch"] for row in rows.epochs if "test" in row] == [2, 3]
    outcome = train(SmallResNet(), Toy(24), settings(epochs=4), Execution(device=CPU, steps=4), listener=rows)
    assert (outcome.steps, outcome.finished) == (4, False)


def test_a_checkpoint_follows_each_evaluation_and_not_each_epoch(tmp_path):
    execution = Execution(device=CPU, evaluate_epochs=3)
    train(SmallResNet(), Toy(24), settings(epochs=5), execution, out=tmp_path)  # 3 steps per epoch
    assert [path.name[:13] for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step-00000009",
        "step-00000015",
    ]


def test_a_run_may_have_a_length_in_steps_and_end_within_an_epoch():
    rows = Rows()
    chosen = settings(epochs=None, steps=5, schedule=Poly(1.0))
    outcome = train(SmallResNet(), Toy(24), chosen, HERE, listener=rows)
    assert (outcome.steps, outcome.finished) == (5, True)
    assert [row["lr"] for row in rows.steps] == pytest.approx([0.02 * (1 - k / 5) for k in range(5)])
    assert [(row["epoch"], row["step"]) for row in rows.epochs] == [(0, 3), (1, 5)]


def test_groups_have_rates_of_their_own():
    frozen, free = ParameterGroup(names="head.*", lr_factor=0.0), ParameterGroup(max_ndim=1, weight_decay=0.0)
    model = SmallResNet()
    before = copy.deepcopy(model.double().state_dict())
    train(model, Toy(24), settings(groups=(frozen, free)), HERE)
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert moved == {name for name, _ in model.named_parameters() if not name.startswith("head.")}


def test_a_batch_may_be_lists_of_images_of_different_sizes():
    class Sizes(Toy):
        def __init__(self):
            super().__init__()
            self.train.load = self.test.load = self.load

        def load(self, shares, *, seed):
            for _, indices in shares:
                images = [self.train.images[i][:, : 6 + i % 3] for i in indices.tolist()]
                yield images, self.train.labels[indices].tolist()

        def loss(self, model, batch):
            parts = [super(Sizes, self).loss(model, (x[None], torch.tensor([y]))) for x, y in zip(*batch, strict=True)]
            total = sum(part.sum for part in parts)
            return Sum(total, len(parts), {"wrong": sum(part.counts["wrong"] for part in parts)})

    whole, cut = SmallResNet(), SmallResNet()
    cut.load_state_dict(whole.state_dict())
    for model, size in ((whole, 8), (cut, 3)):
        train(model, Sizes(), settings(), Execution(device=CPU, micro_batch=size))
    assert_same_state(cut.state_dict(), whole.state_dict(), tol=tolerance("fifty_steps", torch.float64))


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint_before_it(tmp_path):
    class Breaking(Toy):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            broken = model.training and len(self.train.asked) > 4
            return Sum(loss.sum * float("nan"), loss.count, loss.counts) if broken else loss

    with pytest.raises(Diverged, match=r"the loss is nan at step 5; .*step-00000003\.\w+\.pt was written before that"):
        train(SmallResNet(), Breaking(24), settings(epochs=3), HERE, out=tmp_path)
    assert [row["step"] for row in records.read(tmp_path).steps] == [1, 2, 3, 4, 5]
    assert records.read(tmp_path).outcome is None


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    with pytest.raises(Diverged, match="a weight is not finite after step 1"):
        train(
            SmallResNet(mn.GN(groups=4)),
            Toy(8, 0),
            settings(optimizer=SGD(1e308, weight_decay=1e9)),
            HERE,
            out=tmp_path,
        )
    assert not list((tmp_path / "checkpoints").glob("*.pt"))


def test_a_task_without_test_samples_is_trained_and_not_evaluated():
    outcome = train(SmallResNet(), Toy(24, 0), settings(epochs=1), Execution(device=CPU))
    assert outcome.finished
    assert outcome.figures == {}


@pytest.mark.slow
def test_the_size_that_memory_holds_is_told_and_kept_for_the_rest_of_the_run():
    class Cramped(Toy):
        def loss(self, model, batch):
            if len(batch[1]) > 3:
                raise torch.OutOfMemoryError("injected")
            return super().loss(model, batch)

    model, listener = Dropping(), Listening()
    plain = copy.deepcopy(model)
    train(model, Cramped(24), settings(), HERE, listener=listener)
    assert [text.split(";")[0] for text in listener.messages] == [
        f"out of memory with {size} samples per micro-batch" for size in (8, 4)
    ]
    assert [row["micro_batch"] for row in listener.steps] == [2, 2, 2]
    train(plain, Toy(24), settings(), HERE)
    assert_same_state(model.state_dict(), plain.state_dict(), tol=tolerance("fifty_steps", torch.float64))


def test_a_run_is_a_function_of_its_seed_and_leaves_the_callers_generators_alone():
    def run():
        torch.manual_seed(7)
        model = Zoo()  # draws from the global generator
        before = (torch.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate())
        outcome = train(model, Toy(16), settings(), HERE, listener=listener)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (numpy.random.get_state()[1].tolist(), random.getstate()) == before[1:]
        torch.rand(5)
        return outcome.digest

    listener = Listening()
    assert run() == run()
    assert listener.messages[0] == ("invariant in distribution only: unkeyed of Zoo draw from the global generator")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_run_in_less_than_double_precision_learns(dtype):
    rows, model = Rows(), SmallResNet(mn.BCN(groups=4), mn.WS())
    chosen = settings(epochs=8, dtype=dtype, optimizer=SGD(0.1))
    train(model, Toy(24), chosen, Execution(device=CPU, micro_batch=3), listener=rows)
    assert rows.epochs[-1]["train"]["loss"] < 0.7 * rows.epochs[0]["train"]["loss"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.slow
def test_a_compiled_run_ends_like_an_eager_one():
    model = nn.Sequential(
        mn.nn.WSConv2d(3, 8, 3), mn.nn.BatchChannelNorm(8, 4, activation="relu"), nn.Flatten(), nn.Linear(288, 5)
    )
    eager, execution = copy.deepcopy(model), {"device": CPU, "micro_batch": 4}
    expected = train(eager, Toy(24), settings(), Execution(**execution))
    outcome = train(model, Toy(24), settings(), Execution(**execution, compile=True))
    assert outcome.steps == 3
    assert_same_state(model.state_dict(), eager.state_dict(), tol=tolerance("fifty_steps", torch.float64))
    assert outcome.figures == pytest.approx(expected.figures, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_run_that_recomputes_ends_with_the_same_digest_and_says_what_it_spares(dtype):
    torch.manual_seed(7)
    listener, digests = Listening(), []
    plain = SmallResNet(mn.BCN(groups=4), mn.WS())
    for model, recompute in ((copy.deepcopy(plain), True), (plain, False)):
        how = Execution(device=CPU, micro_batch=3, recompute=recompute)
        digests.append(train(model, Toy(24), settings(dtype=dtype), how, listener=listener).digest)
        assert not model._forward_hooks
    assert digests[0] == digests[1]
    (said,) = (text for text in listener.messages if "recomputed" in text)
    # The stem's, the strided convolution's, and the first of each block. Sums with a shortcut are kept.
    assert said.startswith("4 activations not kept: ")


def test_a_run_without_anything_to_recompute_is_refused():
    with pytest.raises(ValueError, match="SmallResNet has no BatchChannelNorm"):
        train(SmallResNet(mn.GN(groups=4)), Toy(24), settings(), Execution(device=CPU, recompute=True))


class Kept(SGD):
    """Its optimizers outlive their runs."""

    made = []  # noqa: RUF012

    def __call__(self, parameters, **options):
        self.made.append(super().__call__(parameters, **options))
        return self.made[-1]


def test_a_trained_model_is_committed_by_whoever_trains_it_next():
    model = SmallResNet(mn.BCN(groups=2), channels=4)
    train(model, Toy(), settings(optimizer=Kept(0.02)), Execution(device=CPU, steps=1))
    before = model.norm.running_mean.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 3, 8, 8, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert Kept.made
    assert not torch.equal(model.norm.running_mean, before)
