"""Segmentation of volumes: the loss is a sum of what each sample gives alone, and the score is the Dice by class."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import micronorm as mn
from micronorm.engine.task import Task
from micronorm.recipes.networks import ResidualUNet3d
from micronorm.tasks import open_task
from micronorm.tasks.volumes import Volumes, dice_and_entropy, sliding_window
from tests.data.miniature import write_decathlon
from tests.tasks.exchange import sent
from tests.tolerances import assert_close_to_max, tolerance

PATCH = (8, 16, 8)


def task() -> Task:  # the annotation is the test: pyright checks the protocol
    return Volumes([None], [], names=("background", "Anterior", "Posterior"), patch=PATCH)


def network(norm=None, weight=None) -> nn.Module:
    torch.manual_seed(0)
    plain = ResidualUNet3d(widths=(8, 16, 16), blocks=(1, 1, 1), classes=3)
    return plain if norm is None else mn.convert(plain, norm, weight)


def batch_of(count: int, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    volumes = torch.randn(count, 1, *PATCH, dtype=dtype, generator=generator)
    return volumes, torch.randint(0, 3, (count, *PATCH), generator=generator)


def test_a_network_with_unequal_numbers_of_widths_and_blocks_is_refused():
    with pytest.raises(ValueError, match="a width and a number of blocks, got 2 and 1"):
        ResidualUNet3d(widths=(8, 16), blocks=(1,), classes=3)


def test_dice_and_entropy_are_those_of_the_equations():
    logits, labels = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randint(0, 3, (2, 4, 5))
    dice, entropy = dice_and_entropy(logits, labels)
    for n in range(2):
        p = logits[n].softmax(0)
        by_class = [(2 * p[k][labels[n] == k].sum() + 1) / (p[k].sum() + (labels[n] == k).sum() + 1) for k in (1, 2)]
        assert dice[n].item() == pytest.approx(sum(by_class).item() / 2)
        chosen = p.gather(0, labels[n][None])[0]
        assert entropy[n].item() == pytest.approx(-chosen.log().mean().item())


def test_the_loss_weighs_coarser_levels_by_halves_and_compares_them_with_the_nearest_labels():
    problem, (volumes, labels) = task(), batch_of(2)
    fine, coarse = torch.randn(2, 3, *PATCH).double(), torch.randn(2, 3, 4, 8, 4).double()
    loss = problem.loss(lambda x: [fine, coarse], (volumes, labels))
    parts = [dice_and_entropy(fine, labels), dice_and_entropy(coarse, labels[:, 1::2, 1::2, 1::2])]
    sums = [(entropy + 1 - dice).sum() for dice, entropy in parts]
    expected = 2 / 3 * sums[0] + 1 / 3 * sums[1]
    assert loss.sum.item() == pytest.approx(expected.item())
    assert (loss.count, loss.counts["soft_dice"].item()) == (2, pytest.approx(parts[0][0].sum().item()))
    assert problem.figures({"loss": 3.0, "count": 2.0, "soft_dice": 1.0}) == {"loss": 1.5, "soft_dice": 50.0}


@pytest.mark.parametrize("norm, weight", [(mn.BCN(), mn.WS()), (mn.GN(), mn.WS()), (mn.IN(), None)])
def test_a_step_with_dice_and_deep_supervision_does_not_depend_on_its_split(norm, weight):
    problem = task()

    def loss(model, part):
        found = problem.loss(model, part)
        return found.sum, found.count

    report = mn.check_cuts(network(norm, weight).double(), batch_of(4), loss)
    assert report.ok, report
    assert report.worst <= 1e-10


def test_a_dice_over_the_whole_batch_does_depend_on_it():
    def batch_dice(model, part):
        volumes, labels = part
        p = model(volumes)[0].softmax(1)[:, 1:]
        truth = F.one_hot(labels, 3).movedim(-1, 1)[:, 1:]
        return len(labels) * (1 - 2 * (p * truth).sum() / (p + truth).sum()), len(labels)

    assert not mn.check_cuts(network(mn.GN(), mn.WS()).double(), batch_of(4), batch_dice).ok


def test_a_sliding_window_of_a_pointwise_network_is_the_network():
    model = nn.Conv3d(1, 3, 1).double()
    for size in ((9, 30, 11), (3, 16, 8), (8, 16, 8), (7, 5, 33)):
        volume = torch.randn(1, *size, dtype=torch.float64)
        found = sliding_window(model, volume, patch=PATCH)
        assert_close_to_max(found, model(volume[None])[0], tol=tolerance("one_step", torch.float64))
    calls = []
    sliding_window(lambda x: calls.append(len(x)) or x, torch.zeros(1, 17, 16, 17), patch=PATCH)
    assert calls == [8, 8]  # four starts along two axes: no two windows are more than half a window apart


def test_the_score_is_the_mean_dice_over_volumes_of_each_class_that_occurs():
    def model(x):  # the input is the predicted class
        return 10 * F.one_hot(x[:, 0].long(), 3).movedim(-1, 1).float()

    problem = task()
    truth = torch.zeros(2, *PATCH, dtype=torch.int64)
    guess = truth.clone()
    truth[0, 0, 0, :4], guess[0, 0, 0, 2:8] = 1, 1  # Dice 2·2/(4 + 6)
    truth[1, 0, 0, :4], guess[1, 0, 0, :4] = 1, 1  # Dice 1
    guess[1, 1, 1, 1] = 2  # class 2 occurs in one volume, and only by mistake: Dice 0
    batches = [([g[None].float()], [t]) for g, t in zip(guess, truth, strict=True)]
    total = problem.new_score()
    for batch in batches:
        score = problem.score(model, batch)
        part = problem.new_score()
        part.load_state_dict(sent(score.state_dict()))
        total.merge(part)
    assert total.figures() == pytest.approx({"dice": 35.0, "dice_anterior": 70.0, "dice_posterior": 0.0})
    with pytest.raises(ValueError, match="no class occurs in the test volumes"):
        problem.score(model, ([torch.zeros(1, *PATCH)], [torch.zeros(PATCH, dtype=torch.int64)])).figures()


@pytest.mark.parametrize("norm", [mn.BCN(), mn.BN()])
def test_a_folded_unet_computes_the_same(norm):
    model = network(norm, mn.WS()).double().eval()
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
    volumes, _ = batch_of(2)
    assert_close_to_max(mn.fold(model)(volumes), model(volumes), tol=tolerance("folded", torch.float64))


def test_all_norms_of_the_unet_but_those_of_shortcuts_compute_their_leaky_relu():
    plan = mn.plan(ResidualUNet3d(widths=(8, 16), blocks=(1, 1), classes=3), mn.BCN(), mn.WS())
    assert str(plan).count("and the LeakyReLU after it") == 2  # with the addition
    assert str(plan).count("; with the LeakyReLU after it") == 4


def test_the_task_is_opened_by_its_name_and_shows_slices(tmp_path):
    pytest.importorskip("nibabel")
    write_decathlon(tmp_path / "hippocampus")
    problem = open_task("volumes", "hippocampus-fold4", tmp_path)
    assert problem.sample == "volume"
    model = nn.Conv3d(1, 3, 1).train()
    found = problem.examples(model, count=2)
    assert len(found) == 2
    assert model.training
    assert found[0]["label"] == "anterior, posterior"
    assert found[0]["note"] == "slice 2 of 9"
    with pytest.raises(ValueError, match=r"gives shape \(2, 4, 8, 16, 8\) .* 3 classes"):
        problem.loss(nn.Conv3d(1, 4, 1), batch_of(2, torch.float32))
