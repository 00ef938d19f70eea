"""Volumes of the Medical Segmentation Decathlon: folds, patches, and errors before training."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from micronorm.data.files import fold_of
from micronorm.data.volumes import Volume, VolumePatches, open_decathlon, read_volume
from tests.data.miniature import write_decathlon

nibabel = pytest.importorskip("nibabel")

PATCH = (8, 8, 8)


@pytest.fixture
def root(tmp_path):
    write_decathlon(tmp_path / "hippocampus")
    return tmp_path / "hippocampus"


def _open(folder, *, fold=0):
    return open_decathlon(folder, name="hippocampus", fold=fold, patch=PATCH)


def _load(samples, indices, *, epoch=0, seed=3):
    return next(samples.load([(epoch, torch.tensor(indices))], seed=seed))


def _save(path, array, affine=None):
    nibabel.save(nibabel.Nifti1Image(array, np.eye(4) if affine is None else affine), path)


def _move_labels(root, affine):
    """Give the labels of v1 (10×12×11) another affine."""
    path = root / "labelsTr/v1.nii.gz"
    _save(path, np.asarray(nibabel.load(path).dataobj), np.array(affine, dtype=float))


@pytest.mark.parametrize("below", ["", ".."])
def test_a_hash_of_the_file_name_decides_the_fold(root, below):
    folds = [fold_of(f"v{k}.nii.gz") for k in range(6)]
    for fold in range(5):
        opened = _open(root / below, fold=fold)
        assert (len(opened.train), len(opened.test)) == (6 - folds.count(fold), folds.count(fold))
        assert opened.names == ("background", "Anterior", "Posterior")


def test_each_volume_is_normalized_by_itself(root):
    for k in (0, 1):  # of scale 100,000, and bytes
        volume = read_volume(root / f"imagesTr/v{k}.nii.gz", root / f"labelsTr/v{k}.nii.gz", classes=3)
        assert abs(volume.image.mean()) < 1e-6
        assert volume.image.std(correction=0) == pytest.approx(1, rel=1e-6)


def test_test_volumes_keep_their_shape_and_come_as_lists(root):
    images, labels = _load(_open(root, fold=4).test, [0, 1])
    assert [tuple(image.shape) for image in images] == [(1, 9, 12, 10), (1, 10, 12, 11)]
    assert [tuple(label.shape) for label in labels] == [(9, 12, 10), (10, 12, 11)]
    expected = np.asarray(nibabel.load(root / "labelsTr/v0.nii.gz").dataobj)
    assert labels[0].tolist() == expected.tolist()


def test_a_patch_is_a_window_of_the_volume_with_its_labels_perhaps_mirrored():
    numbers = torch.arange(5 * 7 * 6).reshape(5, 7, 6)
    samples = VolumePatches([Volume(numbers.float() * 1e6, numbers.to(torch.uint8))] * 2, patch=(3, 7, 4))
    seen = set()
    for epoch in range(40):
        (image,), (labels,) = (column[1:] for column in _load(samples, [0, 1], epoch=epoch))
        steps = [int(labels.select(axis, 1).flatten()[0] - labels.select(axis, 0).flatten()[0]) for axis in range(3)]
        flips = [axis for axis, step in enumerate(steps) if step < 0]
        upright = labels.flip(flips)
        d, h, w = (int(i) for i in torch.unravel_index(upright.flatten()[0], (5, 7, 6)))
        assert torch.equal(upright, numbers[d : d + 3, h : h + 7, w : w + 4])
        # Brightness and noise are tiny beside steps of a million; contrast is one factor for all voxels.
        factor = image[0] / (1e6 * labels).clamp_min(1)
        assert factor[labels > 0].std() < 1e-5
        seen.add((d, w, tuple(flips)))
    assert {d for d, _, _ in seen} == {0, 1, 2}
    assert {w for _, w, _ in seen} == {0, 1, 2}
    assert len({flips for _, _, flips in seen}) == 8


def test_a_smaller_volume_lies_in_the_middle_of_its_patch():
    volume = Volume(torch.full((2, 8, 3), 9.0), torch.ones(2, 8, 3, dtype=torch.uint8))
    (image,), (labels,) = _load(VolumePatches([volume], patch=(4, 4, 5)), [0])
    inside = torch.zeros(4, 4, 5, dtype=torch.bool)
    inside[1:3, :, 1:4] = True
    assert torch.equal(labels == 1, inside)
    assert torch.equal(image[0] == 0, ~inside)


@pytest.mark.parametrize(
    "affine, apart",
    [
        (np.diag([-1, 1, 1, 1]), "18"),  # left and right exchanged
        (np.diag([1, 1, 2, 1]), "10"),  # slices twice as thick
        ([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], "1"),  # one voxel further
    ],
)
def test_labels_that_lie_elsewhere_than_their_image_are_refused(root, affine, apart):
    _move_labels(root, affine)
    with pytest.raises(ValueError, match=rf"labelsTr/v1\.nii\.gz lies elsewhere .* up to {apart} voxels apart"):
        _open(root)


@pytest.mark.parametrize(
    "diagonal, message",
    [
        ([-1, 1, 1], r"one orientation: .*imagesTr/v1\.nii\.gz has LAS, .*imagesTr/v0\.nii\.gz RAS; turn it"),
        ([1, 1, 1.1], r"one spacing: .*imagesTr/v1\.nii\.gz are 1×1×1\.1, .*imagesTr/v0\.nii\.gz 1×1×1; resample"),
        ([1, 1, 1.04], None),
    ],
)
def test_volumes_of_another_orientation_or_spacing_are_refused(root, diagonal, message):
    for folder in ("imagesTr", "labelsTr"):
        path = root / folder / "v1.nii.gz"
        _save(path, np.asarray(nibabel.load(path).dataobj), np.diag([*diagonal, 1.0]))
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        _open(root)


def test_a_set_without_foreground_for_training_is_refused(root):
    for path in (root / "labelsTr").iterdir():
        if fold_of(path.name) != 0:
            _save(path, np.zeros(nibabel.load(path).shape, np.uint8))
    with pytest.raises(ValueError, match=r"no training volume of .* has a voxel of Anterior, Posterior: .*labelsTr"):
        _open(root)


def test_affines_that_differ_by_rounding_are_those_of_one_volume(root):
    _move_labels(root, np.eye(4) * [1 + 1e-4, 1 - 1e-4, 1, 1] + 1e-6)
    assert len(_open(root).train) == 5


@pytest.mark.parametrize(
    "break_it, error, message",
    [
        (lambda r: _save(r / "labelsTr/v2.nii.gz", np.zeros((3, 4, 5), np.uint8)), ValueError,
         r"labelsTr/v2\.nii\.gz must label .* 3×4×5 voxels, .*imagesTr/v2\.nii\.gz 11×12×10"),
        (lambda r: _save(r / "labelsTr/v1.nii.gz", np.full((10, 12, 11), 3, np.uint8)), ValueError,
         r"labelsTr/v1\.nii\.gz has the label 3; labels must be whole numbers from 0 to 2"),
        (lambda r: _save(r / "labelsTr/v1.nii.gz", np.full((10, 12, 11), 0.5, np.float32)), ValueError,
         r"v1\.nii\.gz has the label 0\.5"),
        (lambda r: _save(r / "imagesTr/v0.nii.gz", np.ones((9, 12, 10), np.float32)), ValueError,
         r"imagesTr/v0\.nii\.gz is constant"),
        (lambda r: _save(r / "imagesTr/v0.nii.gz", np.full((9, 12, 10), np.nan, np.float32)), ValueError,
         r"imagesTr/v0\.nii\.gz is constant or has values that are not finite"),
        (lambda r: (r / "imagesTr/v3.nii.gz").write_bytes((r / "imagesTr/v3.nii.gz").read_bytes()[:-200]), ValueError,
         r"imagesTr/v3\.nii\.gz is not a readable NIfTI file"),
        (lambda r: (r / "imagesTr/v3.nii.gz").write_bytes(b"no volume"), ValueError, r"v3\.nii\.gz is not a readable"),
        (lambda r: (r / "labelsTr/v5.nii.gz").unlink(), FileNotFoundError, r"labelsTr/v5\.nii\.gz is listed in .*json"),
        (lambda r: (r / "dataset.json").write_text("{"), ValueError, r"dataset\.json is not a JSON file"),
        (lambda r: (r / "dataset.json").write_text(json.dumps({"labels": {"1": "a"}, "training": []})), ValueError,
         r"dataset\.json must have labels, numbered from 0"),
        (lambda r: (r / "dataset.json").unlink(), FileNotFoundError, "cannot find hippocampus in"),
    ],
)  # fmt: skip
def test_a_broken_set_is_refused_with_the_name_of_the_file(root, break_it, error, message):
    break_it(root)
    with pytest.raises(error, match=message):
        _open(root)


def test_bad_arguments_are_refused(root):
    with pytest.raises(ValueError, match="fold must lie between 0 and 4, got 5"):
        _open(root, fold=5)
    with pytest.raises(ValueError, match="patch must be three positive sizes"):
        open_decathlon(root, name="hippocampus", fold=0, patch=(8, 0, 8))
    with pytest.raises(IndexError, match="do not lie within the 5 samples"):
        _load(_open(root).train, [5])
