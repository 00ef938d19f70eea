"""Segmentation of generated shapes: the loss is a sum over labelled pixels, and a small network learns it."""

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import micronorm as mn
from micronorm import records
from micronorm.data.shapes import CLASSES, VOID, ShapeSamples
from micronorm.engine.settings import Execution
from micronorm.engine.task import Task
from micronorm.recipes import find
from micronorm.recipes.run import Variation, run_recipe
from micronorm.tasks import open_task
from micronorm.tasks.pictures import colour_labels
from tests.data.miniature import write_label_maps, write_voc


def task() -> Task:  # the annotation is the test: pyright checks the protocol
    return open_task("segmentation", "shapes")


def batch_of(problem, *indices):
    return next(problem.test.load([(0, torch.tensor(indices))], seed=0))


def test_the_loss_is_a_sum_over_labelled_pixels():
    problem, model = task(), nn.Conv2d(3, 4, 1).double()
    images, labels = batch_of(problem, 0, 1, 2)
    images = images.double()
    loss = problem.loss(model, (images, labels))
    assert loss.count == (labels != VOID).sum() < labels.numel()
    logits = model(images).permute(0, 2, 3, 1)[labels != VOID]
    assert loss.sum.item() == pytest.approx(F.cross_entropy(logits, labels[labels != VOID], reduction="sum").item())
    parts = [problem.loss(model, (images[cut], labels[cut])) for cut in (slice(1), slice(1, 3))]
    assert sum(part.sum.item() for part in parts) == pytest.approx(loss.sum.item())
    assert sum(part.counts["wrong"].item() for part in parts) == loss.counts["wrong"].item()
    assert problem.figures({"loss": 6.0, "count": 4.0, "wrong": 1.0}) == {"loss": 1.5, "pixel_error": 25.0}


def test_images_of_different_sizes_come_as_lists():
    problem, model = task(), nn.Conv2d(3, 4, 1)
    images, labels = batch_of(problem, 0, 1)
    lists = ([images[0], images[1][:, :20]], [labels[0], labels[1][:20]])
    loss = problem.loss(model, lists)
    assert loss.count == (labels[0] != VOID).sum() + (labels[1][:20] != VOID).sum()
    assert problem.score(model, lists).counts.sum() == loss.count


def test_the_score_counts_pixels_by_class():
    problem, model = task(), nn.Conv2d(3, 4, 1)
    images, labels = batch_of(problem, 3, 4, 5)
    score = problem.score(model, (images, labels))
    assert score.counts.sum(1).tolist() == [(labels == k).sum() for k in range(4)]


def test_the_score_on_voc_agrees_with_a_count_of_the_files(tmp_path):
    write_voc(tmp_path)
    problem, model = open_task("segmentation", "voc", tmp_path), nn.Conv2d(3, 21, 1).eval()
    (image,), (labels,) = batch_of(problem, 0)
    score = problem.score(model, ([image], [labels]))
    mask = np.array(Image.open(tmp_path / "SegmentationClass/c.png"))  # a palette file: the values are the labels
    counts = np.bincount(mask.ravel(), minlength=256)
    assert counts[255] == mask.shape[1]  # the border is void
    assert score.counts.sum(1).tolist() == counts[:21].tolist()
    answer = model(image[None])[0].argmax(0).numpy()
    counted = mask != 255
    pairs = [((mask == k) & counted, (answer == k) & counted) for k in range(21)]
    overlaps = [(truth & found).sum() / (truth | found).sum() for truth, found in pairs if (truth | found).any()]
    assert score.figures()["miou"] == pytest.approx(100 * float(np.mean(overlaps)))


def test_a_folder_of_label_maps_trains_with_as_many_outputs_as_it_has_classes(tmp_path):
    write_label_maps(tmp_path / "data")
    recipe = replace(find("label_maps"), network="shapes")  # a small network
    execution = Execution(device=torch.device("cpu"), steps=1)
    run_recipe(recipe, out=tmp_path / "run", data=tmp_path / "data", execution=execution)
    assert records.read(tmp_path / "run").facts["data"]["names"] == ["earth", "water", "air"]
    with pytest.raises(ValueError, match="label_maps/bcn-ws has as many outputs as its data set has classes"):
        recipe.build(seed=0)
    loaded = mn.load(tmp_path / "run", model=recipe.build(seed=0, classes=3))
    assert loaded(torch.zeros(1, 3, 16, 16)).shape == (1, 3, 16, 16)


def test_pictures_are_samples_by_index_and_seed_alone():
    def load(*indices, seed=1, **options):
        return next(ShapeSamples(8, seed=seed, **options).load([(0, torch.tensor(indices))], seed=3))

    images, labels = load(5, 2)
    again, same = load(2)
    assert torch.equal(images[1:], again)
    assert torch.equal(labels[1:], same)
    assert not torch.equal(images, load(5, 2, seed=2)[0])
    assert set(labels.unique().tolist()) <= {0, 1, 2, 3, VOID}
    for index in range(8):  # mirrored or not, image and labels together
        (image,), (label,) = load(index, augment=True)
        (plain,), (truth,) = load(index)
        flipped = torch.equal(image, plain.flip(-1))
        assert torch.equal(image, plain.flip(-1) if flipped else plain)
        assert torch.equal(label, truth.flip(-1) if flipped else truth)


def test_examples_show_image_truth_and_prediction_in_the_colours_of_the_classes():
    problem, model = task(), nn.Conv2d(3, 4, 1).train()
    found = problem.examples(model, count=2)
    assert model.training
    _, labels = batch_of(problem, 0)
    truth = Image.open(io.BytesIO(base64.b64decode(found[0]["truth"]))).convert("RGB")
    assert truth.size == (128, 128)  # 32 pixels, each repeated
    assert torch.equal(
        torch.from_numpy(np.array(truth))[::4, ::4].permute(2, 0, 1), colour_labels(labels[0], void=VOID)
    )
    answer = model.eval()(batch_of(problem, 0)[0]).argmax(1)
    right = (answer == labels)[labels != VOID].float().mean()
    assert found[0]["note"] == f"{100 * right:.0f} % of the pixels are right"
    assert found[0]["colours"]["background"] == "#000000"
    assert found[0]["colours"]["no label"] == "#e0e0c0"
    assert found[0]["label"].startswith("background, ")


def test_what_does_not_fit_is_refused():
    problem = task()
    with pytest.raises(ValueError, match=r"gives shape \(2, 3, 32, 32\) .* 4 classes; .* N×4×32×32"):
        problem.loss(nn.Conv2d(3, 3, 1), batch_of(problem, 0, 1))


def test_a_recipe_of_another_task_trains_without_a_change_in_the_engine(tmp_path):
    recipe = find("shapes")
    assert recipe.definition()["task"] == "segmentation"
    assert "task" not in find("digits").definition()
    execution = Execution(device=torch.device("cpu"), steps=3)
    outcome = run_recipe(recipe, out=tmp_path, variation=Variation(step_batch=8), execution=execution)
    assert outcome.figures.keys() == {"miou", "accuracy"}
    record = records.read(tmp_path)
    assert record.steps[-1]["pixel_error"] > 0
    assert record.facts["data"] == {
        "name": "shapes",
        "train": 2048,
        "test": 128,
        "sample": "image",
        "names": list(CLASSES),
    }
    assert len(record.predictions) == 8


def miou_without_telling_shapes_apart(problem) -> float:
    """Return the mIoU, in %, of a prediction that finds every shape, but gives all of them the commonest class."""
    _, labels = batch_of(problem, *range(len(problem.test)))
    shapes = torch.bincount(labels[(labels != VOID) & (labels != 0)], minlength=4)
    # The background's IoU is 1. Of the shapes, the commonest has its share of their pixels, the others have 0.
    return 100 * (1 + (shapes.max() / shapes.sum()).item()) / 4


@pytest.mark.slow
def test_a_small_network_learns_to_tell_shapes_apart():
    outcome = run_recipe(find("shapes/bcn-ws"), out=None, execution=Execution(device=torch.device("cpu")))
    assert outcome.figures["miou"] > miou_without_telling_shapes_apart(task())
