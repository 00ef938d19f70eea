"""Opening a task: a data set declares its options by the parameters of the function that opens it."""

import importlib
import inspect

import pytest

from micronorm import recipes
from micronorm.tasks import TASKS, open_predictor, open_task


def data_sets(task):
    module, _, dictionary = TASKS[task].partition(".")
    return getattr(importlib.import_module(f"micronorm.tasks.{module}"), dictionary)


@pytest.mark.parametrize("task", TASKS)
def test_the_parameters_of_every_data_set_are_options_of_open_task(task):
    known = inspect.signature(open_task).parameters.keys() - {"task", "data"}
    for name, open_data in data_sets(task).items():
        own = inspect.signature(open_data).parameters.keys()
        assert own <= known, name


def test_the_data_of_every_recipe_are_data_of_its_task():
    for table in recipes.tables().values():
        for recipe in table.rows:
            assert recipe.data in data_sets(recipe.task), recipe.name


@pytest.mark.parametrize(
    "task, data, options, message",
    [
        ("nonesuch", "coco", {}, "no task 'nonesuch'; there are classification, segmentation"),
        (
            "classification",
            "mnist",
            {},
            "no data set is known as 'mnist'; there are digits, cifar10, cifar100, imagenet",
        ),
        (
            "classification",
            "digits",
            {"folder": "data", "size": 64},
            "digits has no option --data and --size: leave it out",
        ),
        ("classification", "cifar10", {"size": 64}, "options of cifar10 are --data, --download, --unverified"),
        ("classification", "imagenet", {"download": True}, "imagenet has no option --download"),
        ("classification", "imagenet", {"verify": False}, "imagenet has no option --unverified"),
        ("segmentation", "shapes", {"size": 64}, "shapes has no option --size: leave it out; .* are none"),
        ("segmentation", "label_maps", {}, "label_maps reads your own data: give its folder with --data"),
        ("instances", "nuclei", {"size": 64}, "nuclei has no option --size"),
        ("video", "motion", {"workers": 1}, "motion has no option --workers"),
        ("video", "motion", {"classes": 9}, r"motion has 10 classes \(right, left, …\), the model 9 outputs"),
        ("volumes", "hippocampus-fold5", {}, "no data set is known as 'hippocampus-fold5'"),
        ("volumes", "hippocampus-fold0", {"size": 3}, "hippocampus-fold0 has no option --size"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(task, data, options, message):
    with pytest.raises(ValueError, match=message):
        open_task(task, data, **options)


@pytest.mark.parametrize("task, data", [("video", "motion"), ("volumes", "hippocampus-fold0")])
def test_a_task_whose_samples_are_not_images_predicts_no_image(task, data):
    with pytest.raises(
        ValueError, match=f"predict reads images, which are not the samples of {data}: .*docs/{task}.md"
    ):
        open_predictor(task, data, names=("a", "b"), size=24)
