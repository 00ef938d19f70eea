"""The law on clips: a clip is one sample, and its frames stay together."""

import copy

import pytest
import torch
import torch.nn.functional as F

import micronorm as mn
from micronorm.recipes.networks import SmallImageResNet
from micronorm.recipes.temporal_shift import temporal_shift
from tests.networks import assert_same_state, step
from tests.tolerances import tolerance

FRAMES, CLIPS = 4, 6
# Norms of one clip: those that see a batch as micro-batches must have the frames of one clip in each.
NORMS = {
    "BCN+WS": (mn.BCN(), mn.WS()),
    "GN+WS": (mn.GN(), mn.WS()),
    "Algorithm 1": (mn.BCN(statistics="sequential", rate=0.01, micro_batch=FRAMES), mn.WS()),
    "BN": (mn.BN(micro_batch=FRAMES), None),
}
norms = pytest.mark.parametrize("norm, weight", NORMS.values(), ids=NORMS.keys())


def network(norm, weight):
    torch.manual_seed(0)
    made = SmallImageResNet(widths=(8, 16), blocks=(1, 1), classes=3, inputs=1)
    return mn.convert(temporal_shift(made, frames=FRAMES), norm, weight).double()


def clips(seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(CLIPS, FRAMES, 1, 8, 8, dtype=torch.float64, generator=generator)
    return pixels, torch.arange(CLIPS) % 3


def loss(model, part):
    pixels, labels = part
    return F.cross_entropy(model(pixels), labels, reduction="sum"), len(labels)


@norms
def test_a_step_does_not_depend_on_how_its_clips_were_cut(norm, weight):
    report = mn.check_cuts(network(norm, weight), clips(), loss)
    assert report.ok, report


def test_batch_norm_over_the_frames_of_all_clips_depends_on_the_cut():
    report = mn.check_cuts(network(mn.BN(), mn.WS()), clips(), loss)
    assert not report.ok
    assert report.findings[0].cause == "batch_statistics"


@pytest.mark.slow
@norms
def test_fifty_steps_do_not_depend_on_how_their_clips_were_cut(norm, weight):
    def train(model, cut):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
        for k in range(50):
            step(model, optimizer, *clips(k), cut)
        return model.state_dict()

    model = network(norm, weight)
    whole = train(copy.deepcopy(model), [CLIPS])
    assert_same_state(train(model, [1, 3, 2]), whole, tol=tolerance("fifty_steps", torch.float64))
