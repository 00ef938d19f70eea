"""Scores of parts add up to the score of the whole, also after a way through bytes."""

import pytest
import torch

from micronorm.engine.task import Score
from micronorm.tasks.scores import ConfusionMatrix, SumScore
from tests.tasks.exchange import sent


def sums(values) -> SumScore:
    return SumScore(
        lambda s: {"mean": s["total"] / s["count"]}, {"total": values.sum(), "count": torch.tensor(len(values))}
    )


def matrix(truth, prediction) -> ConfusionMatrix:
    score = ConfusionMatrix(4)
    score.add(truth, prediction, void=255)
    return score


def received(score: Score, empty: Score) -> Score:
    empty.load_state_dict(sent(score.state_dict()))
    return empty


def test_sums_of_parts_add_up():
    values = torch.randn(10)
    total = SumScore(sums(values).to_figures)
    for part in values.split(3):
        total.merge(received(sums(part), SumScore(total.to_figures)))
    assert total.figures()["mean"] == pytest.approx(values.double().mean().item(), rel=1e-6)


def test_confusion_matrices_of_parts_add_up_and_void_pixels_do_not_count():
    truth, prediction = torch.randint(4, (6, 5, 5)), torch.randint(4, (6, 5, 5))
    truth[:, 0] = 255
    total = ConfusionMatrix(4)
    for part in (slice(2), slice(2, 6)):
        total.merge(received(matrix(truth[part], prediction[part]), ConfusionMatrix(4)))
    assert torch.equal(total.counts, matrix(truth, prediction).counts)
    assert total.counts.sum() == 6 * 20
    overlaps = []
    for k in range(4):
        mine, theirs = (truth == k), (prediction == k) & (truth != 255)
        overlaps.append(((mine & theirs).sum() / (mine | theirs).sum()).item())
    assert total.figures()["miou"] == pytest.approx(100 * sum(overlaps) / 4, rel=1e-5)
    labelled = truth != 255
    right = (truth == prediction)[labelled].double().mean().item()
    assert total.figures()["accuracy"] == pytest.approx(100 * right)


def test_classes_that_do_not_occur_are_left_out_of_the_mean():
    score = matrix(torch.tensor([0, 1]), torch.tensor([0, 1]))
    assert score.figures()["miou"] == 100
    with pytest.raises(ValueError, match="no labelled pixels"):
        ConfusionMatrix(4).figures()


def test_sums_must_be_tensors_without_axes():
    for value in (1.0, torch.ones(4)):
        with pytest.raises(TypeError, match="a sum must be a tensor without axes, 'loss' is"):
            SumScore(dict, {"loss": value})
