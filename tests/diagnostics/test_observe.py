"""An observer records a whole step however it was cut, and refuses models it cannot observe."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import micronorm as mn
from micronorm.nn.per_step.shared_weights import SharedWeights
from tests.diagnostics.observed import EIGHT, assert_same_figures, network, observed_layers
from tests.networks import SmallResNet, samples
from tests.tolerances import tolerance

# --- the law ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["BCN", "GN", "LN", "IN"])
@pytest.mark.parametrize("cuts", [(4, 4), (1,) * EIGHT, (7, 1)])
def test_a_row_does_not_depend_on_how_the_step_was_cut(norm, cuts):
    whole = observed_layers(network(norm))
    assert_same_figures(observed_layers(network(norm), cuts), whole, tol=tolerance("one_step", torch.float64))


@pytest.mark.parametrize("cuts", [(4, 4), (1,) * EIGHT, (7, 1)])
def test_a_row_of_a_sequential_layer_does_not_depend_on_the_cut_either(cuts):
    def build() -> nn.Module:
        torch.manual_seed(0)
        return SmallResNet(mn.BCN(groups=4, statistics="sequential", rate=0.1), mn.WS()).double().train()

    assert_same_figures(
        observed_layers(build(), cuts), observed_layers(build()), tol=tolerance("one_step", torch.float64)
    )


def test_a_row_includes_weights_that_micro_batches_share():
    model = network()
    weights = SharedWeights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = samples(count=EIGHT)
    with mn.observe(model) as observer:
        optimizer.zero_grad()
        with weights.shared():
            for x, y in zip(images.split(2), labels.split(2), strict=True):
                (F.cross_entropy(model(x), y, reduction="sum") / EIGHT).backward()
        optimizer.step()
    assert observer.latest is not None
    expected = observed_layers(network(), (2,) * 4)
    assert_same_figures(observer.latest["layers"], expected, tol=tolerance("one_step", torch.float64))


def test_layers_keep_their_names_in_distributed_data_parallel():
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = network()
        expected = observed_layers(network(), (4, 4))
        wrapped = nn.parallel.DistributedDataParallel(model)
        found = observed_layers(wrapped, (4, 4))
    finally:
        dist.destroy_process_group()
    assert_same_figures(found, expected, tol=tolerance("one_step", torch.float64))


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.slow  # importing the compiler takes ten seconds
def test_compiled_models_are_refused():
    model = network()
    model.block1.compile()
    with pytest.raises(ValueError, match="hooks, and block1 is compiled"):
        mn.observe(model)
    with pytest.raises(ValueError, match="wrapped in OptimizedModule: compiled code does not run hooks"):
        mn.observe(torch.compile(network()))  # type: ignore[arg-type]


def test_an_observed_step_without_a_forward_warns_once():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mn.observe(model, every=1) as observer:
        with pytest.warns(RuntimeWarning, match="saw no forward of the model in step 1: compiled code"):
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
    assert observer.rows == []


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"every": 0}, ValueError, "every must be at least 1, got 0"),
        ({"every": 2.0}, TypeError, "every must be a number of steps, got 2.0"),
        ({"start": -1}, ValueError, "start must be at least 0, got -1"),
    ],
)
def test_arguments_out_of_range_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        mn.observe(network(), **options)


def test_a_model_with_nothing_to_observe_is_refused():
    with pytest.raises(ValueError, match="has neither norm layers nor weights"):
        mn.observe(nn.Sequential(nn.ReLU()))
