"""What every data set must hold, whatever its reader: a new one needs a line in `DATA_SETS` below."""

import inspect
from functools import partial

import pytest
import torch

from micronorm.data.loading import FileSamples
from micronorm.tasks import TASKS, open_task
from tests.data import miniature
from tests.tasks.test_open_task import data_sets

# The data set by task and name, and options that make it small.
DATA_SETS = {
    "classification/digits": {},
    "classification/cifar10": {"verify": False},
    "classification/cifar100": {"verify": False},
    "classification/imagenet": {"size": 32},
    "classification/tiny_imagenet20": {"size": 32},
    "classification/image_folders": {"size": 32},
    "segmentation/shapes": {},
    "segmentation/voc": {"size": 24},
    "segmentation/camvid": {"size": 24},
    "segmentation/label_maps": {"size": 24},
    "detection/coco": {},
    "detection/coco128": {},
    "detection/objects": {},
    "detection/nuclei": {},
    "instances/coco": {},
    "instances/coco128": {},
    "instances/objects": {},
    "instances/nuclei": {},
    "video/motion": {},
    "video/something": {"size": 16},
    "video/jester": {"size": 16},
    "video/clips-0": {"size": 16},
    "volumes/hippocampus-fold0": {},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    miniature.write_binary(root, 10)
    miniature.write_binary(root, 100, 15)
    for name in ("imagenet", "tiny_imagenet20", "image_folders"):
        miniature.write_folders(root / name)
    miniature.write_voc(root / "VOCdevkit" / "VOC2012", augmented=4)
    miniature.write_camvid(root / "camvid")
    miniature.write_label_maps(root)
    for name in ("coco", "coco128", "objects"):
        miniature.write_coco(root / name)
    miniature.write_nuclei(root / "dsb2018")
    for prefix in ("something-something-v1", "jester-v1"):
        miniature.write_frame_folders(root, prefix=prefix)
    return root


@pytest.fixture(scope="module", params=DATA_SETS)
def opened(request, folder):
    """The name of the data set, a function that opens it, and the opened task."""
    task, name = request.param.split("/")
    if name == "clips-0":
        pytest.importorskip("av")
        miniature.write_videos(folder / "clips", count=5)
    if name == "hippocampus-fold0":
        pytest.importorskip("nibabel")
        miniature.write_decathlon(folder / "hippocampus", count=8)
    takes = inspect.signature(data_sets(task)[name]).parameters
    place = folder if "folder" in takes else None
    open_again = partial(open_task, task, name, place, **DATA_SETS[request.param])
    return name, open_again, open_again()


def tensors(value):
    """Yield the tensors of one sample."""
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)


def load(samples, *indices, seed=3, epoch=2):
    """Return the samples of one batch, each as a list of tensors."""
    batch = next(samples.load([(epoch, torch.tensor(indices))], seed=seed))
    return [list(tensors([column[k] for column in batch])) for k in range(len(indices))]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_every_data_set_of_every_task_is_tested_here():
    folds = {f"video/clips-{k}" for k in range(1, 5)} | {f"volumes/hippocampus-fold{k}" for k in range(1, 5)}
    assert {f"{task}/{name}" for task in TASKS for name in data_sets(task)} - folds == set(DATA_SETS)


def test_a_sample_depends_on_seed_epoch_and_index_alone(opened):
    _, _, task = opened
    state = torch.get_rng_state()
    for samples in (task.train, task.test):
        last = min(len(samples), 3) - 1
        whole = load(samples, *range(last, -1, -1))
        assert whole[0][0].dtype == torch.float32
        for k in range(last + 1):
            assert equal(load(samples, last - k)[0], whole[k])
    assert torch.equal(torch.get_rng_state(), state)


def test_training_samples_change_with_epoch_and_seed_and_test_samples_do_not(opened):
    _, _, task = opened
    for options in ([{"epoch": epoch} for epoch in range(8)], [{"seed": seed} for seed in range(8)]):
        for samples in (task.train, task.test):
            images = [load(samples, 0, **option)[0][:1] for option in options]
            assert all(equal(image, images[0]) for image in images) is (samples is task.test)


def test_batches_do_not_depend_on_workers(opened):
    _, open_again, task = opened
    if not isinstance(task.train, FileSamples):
        with pytest.raises(ValueError, match="has no option --workers"):
            open_again(workers=1)
    else:
        decoded = load(open_again(workers=1).train, 1, 0)
        assert all(equal(one, other) for one, other in zip(decoded, load(task.train, 1, 0), strict=True))


def test_an_index_beyond_the_set_is_refused(opened):
    samples = opened[2].train
    for index in (-1, len(samples)):
        with pytest.raises(IndexError, match=f"within the {len(samples)} samples"):
            load(samples, index)
