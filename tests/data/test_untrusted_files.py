"""Data sets from strangers: their lists lead nowhere else, and their files choose no program to run."""

import json
import os
import signal
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image

from micronorm.data.coco import open_coco
from micronorm.data.files import check_picture, decode, find_listed, read_json
from micronorm.data.frame_folders import open_frame_folders
from micronorm.data.masks import open_label_maps, open_voc
from micronorm.data.nuclei import open_nuclei
from micronorm.data.videos import decode_video
from micronorm.data.volumes import open_decathlon
from tests.data import miniature

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 24 18\n%%EndComments\n(x) = flush\nshowpage\n\xff\xd9IEND"


@contextmanager
def in_time(seconds=20):
    def ring(*_):
        raise AssertionError("hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def edit(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def in_coco(root, name):
    miniature.write_coco(root / "set", official=False)
    (root / "set/train/000000000010.jpg").rename(root / "outside.jpg")
    edit(root / "set/instances_train.json", lambda content: content["images"][0].update(file_name=name + ".jpg"))
    return lambda: open_coco(root / "set", masks=False)


def in_voc(root, name):
    miniature.write_voc(root / "set")
    (root / "set/ImageSets/Segmentation/train.txt").write_text(f"b {name}\n")
    for file in ("JPEGImages/a.jpg", "SegmentationClass/a.png"):
        (root / "set" / file).rename(root / f"outside{file[-4:]}")
    return lambda: open_voc(root / "set", size=16)


def in_volumes(root, name):
    pytest.importorskip("nibabel")
    miniature.write_decathlon(root / "set")
    (root / "set/imagesTr/v0.nii.gz").rename(root / "outside.nii.gz")
    edit(root / "set/dataset.json", lambda content: content["training"][0].update(image=name + ".nii.gz"))
    return lambda: open_decathlon(root / "set", name="set", fold=0, patch=(8, 8, 8))


@pytest.mark.parametrize("write", [in_coco, in_voc, in_volumes])
@pytest.mark.parametrize("way", ["../../outside", "../outside", "{}/outside", "a/../../../outside"])
def test_a_name_in_a_list_does_not_lead_out_of_the_data_set(tmp_path, write, way):
    opened = write(tmp_path, way.format(tmp_path))
    with pytest.raises(ValueError, match=r"outside.*which is not below.*set") as error:
        opened()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.png", "./a.png", "b/a.png", "..a.png", "b/..a"])
def test_names_below_the_folder_are_found(tmp_path, name):
    assert find_listed(tmp_path, name, tmp_path / "list") == tmp_path / name


@pytest.mark.parametrize("name", ["", ".", "/", "..", "../a", "b/..", "/etc/passwd"])
def test_other_names_are_not(tmp_path, name):
    with pytest.raises(ValueError, match="names"):
        find_listed(tmp_path, name, tmp_path / "list")


def test_no_program_is_started_for_a_picture_in_postscript(tmp_path, monkeypatch):
    """PIL starts Ghostscript for one, whatever the file's name is."""
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **kwargs: started.append(args))
    for name in ("train/images/0.jpg", "train/masks/0.png"):
        miniature.write_label_maps(tmp_path / name)
        (tmp_path / name / name).write_bytes(EPS)
        with pytest.raises(ValueError, match=r"0\.(jpg|png) is not a readable"):
            open_label_maps(tmp_path / name)
    (tmp_path / "a.jpg").write_bytes(EPS)
    for read in (decode, check_picture):
        with pytest.raises(ValueError, match=r"a\.jpg is not a readable image"):
            read(tmp_path / "a.jpg")
    miniature.write_nuclei(tmp_path / "nuclei")
    (tmp_path / "nuclei/labels/c.png").write_bytes(EPS)
    with pytest.raises(ValueError, match=r"c\.png is not a readable image"):
        open_nuclei(tmp_path / "nuclei", masks=True)
    assert started == []


@pytest.mark.parametrize("format", ["PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM"])
def test_a_picture_may_have_the_suffix_of_another_format(tmp_path, format):
    Image.new("RGB", (5, 4), "red").save(tmp_path / "a.jpg", format=format)
    assert decode(tmp_path / "a.jpg").size == (5, 4)


def test_a_pipe_among_the_pictures_or_videos_is_named_and_not_read_forever(tmp_path):
    os.mkfifo(tmp_path / "a.jpg")
    os.mkfifo(tmp_path / "a.mp4")
    with in_time():
        with pytest.raises(ValueError, match=r"a\.jpg is not a readable image.*regular file"):
            decode(tmp_path / "a.jpg")
        with pytest.raises(ValueError, match=r"a\.mp4 is not a regular file"):
            decode_video(tmp_path / "a.mp4")


@pytest.mark.parametrize(
    "content",
    [
        b"ffconcat version 1.0\nfile good.mp4\n",
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\ngood.mp4\n#EXT-X-ENDLIST\n",
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n",
    ],
    ids=["script", "playlist", "session"],
)
def test_a_video_that_names_other_files_or_addresses_is_not_followed(tmp_path, content):
    av = pytest.importorskip("av")
    miniature.write_video(tmp_path / "good.mp4")
    (tmp_path / "bad.mp4").write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.mp4 is not a readable video"), av.logging.Capture():
        decode_video(tmp_path / "bad.mp4")


def test_a_video_whose_metadata_are_no_text_is_named_or_read(tmp_path):
    av = pytest.importorskip("av")
    miniature.write_video(tmp_path / "a.mp4")
    content = (tmp_path / "a.mp4").read_bytes()
    assert b"VideoHandler" in content
    (tmp_path / "a.mp4").write_bytes(content.replace(b"VideoHandler", b"Video\xffandler"))
    if int(av.__version__.partition(".")[0]) < 19:
        with pytest.raises(ValueError, match=r"a\.mp4 is not a readable video"):
            decode_video(tmp_path / "a.mp4")
    else:  # PyAV reads such metadata
        assert len(decode_video(tmp_path / "a.mp4")) > 0


def test_a_list_that_is_no_text_is_named(tmp_path):
    miniature.write_voc(tmp_path / "voc")
    miniature.write_label_maps(tmp_path / "maps")
    miniature.write_frame_folders(tmp_path / "frames")
    for name, opened in (
        ("voc/ImageSets/Segmentation/val.txt", lambda: open_voc(tmp_path / "voc")),
        ("maps/classes.txt", lambda: open_label_maps(tmp_path / "maps")),
        ("frames/something-something-v1-labels.csv", lambda: open_frame_folders(tmp_path / "frames", name="something")),
    ):
        (tmp_path / name).write_bytes(b"caf\xe9\n")
        with pytest.raises(ValueError, match=rf"{name} must be text in UTF-8"):
            opened()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{", "\0", "1" * 5_000])
def test_json_that_cannot_be_read_is_named(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"a\.json is not a JSON file"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("number", [10**399, 2**63, float("inf"), "1", None])
@pytest.mark.parametrize("part, key", [("images", "id"), ("annotations", "area"), ("categories", "id")])
def test_numbers_of_annotations_that_no_score_can_use_are_named_before_the_training(tmp_path, number, part, key):
    miniature.write_coco(tmp_path, official=False)
    edit(tmp_path / "instances_train.json", lambda content: content[part][0].update({key: number}))
    with pytest.raises(ValueError, match=rf"{part}\[0\] has no valid '{key}'"):
        open_coco(tmp_path, masks=False)


@pytest.mark.parametrize("area", [float("nan"), -1])
def test_an_area_that_belongs_to_every_size_of_objects_or_to_none_is_named(tmp_path, area):
    miniature.write_coco(tmp_path, official=False)
    edit(tmp_path / "instances_train.json", lambda content: content["annotations"][0].update(area=area))
    with pytest.raises(ValueError, match=r"instances_train\.json, annotation 1: area must be a number from 0 on"):
        open_coco(tmp_path, masks=False)


def test_the_size_of_an_outline_may_be_written_as_floats(tmp_path):
    height, width = miniature.COCO_SIZE
    runs = {"size": [float(height), float(width)], "counts": [0, 48, height * width - 48]}
    miniature.write_coco(tmp_path, objects=[miniature.coco_object(1, 10, 3, outline=runs)])
    _, targets, _ = next(open_coco(tmp_path, masks=True).test.load([(0, torch.tensor([0]))], seed=0))
    assert targets[0]["masks"].sum() == 48


def test_two_classes_of_volumes_need_two_names(tmp_path):
    """Figures are by name, so that the second would replace the first."""
    pytest.importorskip("nibabel")
    miniature.write_decathlon(tmp_path, classes=("background", "Anterior", "anterior"))
    with pytest.raises(ValueError, match=r"dataset\.json must give each label a name of its own"):
        open_decathlon(tmp_path, name="x", fold=0, patch=(8, 8, 8))


def test_more_classes_of_volumes_than_a_byte_can_number_are_refused(tmp_path):
    pytest.importorskip("nibabel")
    miniature.write_decathlon(tmp_path, classes=[f"c{k}" for k in range(257)])
    with pytest.raises(ValueError, match="1 to 255 classes, got 257 names"):
        open_decathlon(tmp_path, name="x", fold=0, patch=(8, 8, 8))


def test_a_volume_of_complex_numbers_is_named(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    miniature.write_decathlon(tmp_path)
    values = (np.arange(1080) + 1j).reshape(9, 12, 10).astype(np.complex64)
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), tmp_path / "imagesTr/v0.nii.gz")
    with pytest.raises(ValueError, match=r"v0\.nii\.gz is not a readable NIfTI file.*real numbers"):
        open_decathlon(tmp_path, name="x", fold=0, patch=(8, 8, 8))
