"""Folders of video files: decoding, folds, and files that are no videos."""

import struct
import sys
from types import SimpleNamespace

import pytest
import torch

from micronorm.data import videos
from micronorm.data.files import fold_of
from micronorm.data.videos import decode_video, open_videos
from tests.data.miniature import write_video, write_videos

pytest.importorskip("av")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_videos(tmp_path_factory.mktemp("videos") / "clips")


def load(samples):
    return next(samples.load([(0, torch.arange(len(samples)))], seed=0))


def test_all_frames_are_decoded_in_order(tmp_path):
    write_video(tmp_path / "a.mp4", frames=7)
    frames = decode_video(tmp_path / "a.mp4")
    assert frames.shape == (7, 3, 32, 48)
    bar = frames[:, 0].float().mean(1).argmax(1)  # somewhere in the bar of 6 pixels
    assert ((bar - 4 * torch.arange(7)) - 2.5).abs().max() < 3.5


def _set_display_matrix(path, a, b, c, d):
    content = bytearray(path.read_bytes())
    start = content.find(b"tkhd") + 44
    content[start : start + 36] = struct.pack(">9i", *(65536 * x for x in (a, b, 0, c, d, 0, 0, 0)), 1 << 30)
    path.write_bytes(content)


@pytest.mark.parametrize("matrix", [(1, 0, 0, 1), (0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0)])
def test_frames_are_turned_as_the_file_says(tmp_path, matrix):
    write_video(tmp_path / "a.mp4", frames=2)
    still = decode_video(tmp_path / "a.mp4")
    _set_display_matrix(tmp_path / "a.mp4", *matrix)
    turned = decode_video(tmp_path / "a.mp4")
    a, b, c, d = matrix  # a pixel at (x, y) goes to (a·x + c·y, b·x + d·y), moved back into the frame
    y, x = torch.meshgrid(torch.arange(32), torch.arange(48), indexing="ij")
    right, down = a * x + c * y, b * x + d * y
    assert torch.equal(turned[:, :, down - down.min(), right - right.min()], still)
    assert turned.shape[2:] == (down.max() - down.min() + 1, right.max() - right.min() + 1)


@pytest.mark.parametrize("matrix", [(-1, 0, 0, 1), (0, 1, 1, 0), (1, 1, -1, 1)])
def test_mirrored_and_oblique_videos_are_refused(tmp_path, matrix):
    write_video(tmp_path / "a.mp4", frames=2)
    _set_display_matrix(tmp_path / "a.mp4", *matrix)
    with pytest.raises(ValueError, match=r"a\.mp4 .* mirrored, or turned by no multiple of 90°.*ffmpeg -i OLD NEW"):
        decode_video(tmp_path / "a.mp4")


def test_every_video_is_tested_on_in_exactly_one_fold(folder):
    tested = 0
    for fold in range(5):
        train, test, classes = open_videos(folder.parent, fold=fold, size=16)
        assert classes == ("left", "right")
        assert len(train) + len(test) == 16
        names = sorted(path.name for path in folder.glob("*/*.mp4"))
        assert len(test) == sum(fold_of(name) == fold for name in names)
        tested += len(test)
    assert tested == 16


def test_clips_move_as_their_class_says(folder):
    train, _, _ = open_videos(folder, fold=0, size=16)
    clips, labels = load(train)
    assert clips.shape[1:] == (8, 3, 16, 16)
    bar = clips[:, :, 0].mean(2).argmax(2)
    moved = bar[:, 5] - bar[:, 2]
    assert (moved[labels == 1] > 0).all()
    assert (moved[labels == 0] < 0).all()


def test_an_unreadable_video_is_named(folder, tmp_path):
    write_videos(tmp_path, count=2)
    good = (tmp_path / "left/left0.mp4").read_bytes()
    bad = tmp_path / "right/bad.mp4"
    for content in (b"", b"no video", good[: len(good) // 2]):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=r"right/bad.mp4 is not a readable video .*; replace it or delete it"):
            open_videos(tmp_path, fold=0)


def test_folders_without_videos_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"cannot find .* at least two folders, one per class"):
        open_videos(tmp_path, fold=0)
    write_video(tmp_path / "one/a.mp4")
    write_video(tmp_path / "two/b.mp4")
    empty = next(fold for fold in range(5) if fold not in (fold_of("a.mp4"), fold_of("b.mp4")))
    with pytest.raises(ValueError, match=rf"fold {empty} of .* has 2 samples for training and 0 for testing: add more"):
        open_videos(tmp_path, fold=empty)
    with pytest.raises(ValueError, match="fold must lie between 0 and 4, got 5"):
        open_videos(tmp_path, fold=5)


def test_hidden_files_and_folders_are_skipped_and_a_class_without_videos_is_refused(tmp_path):
    write_videos(tmp_path)
    write_video(tmp_path / ".trash/a.mp4")
    (tmp_path / "left/._left0.mp4").write_bytes(b"as macOS writes beside each file")
    train, test, classes = open_videos(tmp_path, fold=0, size=16)
    assert (len(train) + len(test), classes) == (16, ("left", "right"))
    write_video(tmp_path / "up/ann/a.mp4")
    with pytest.raises(ValueError, match=r"up holds no video \(\.mp4, .*fill it or remove it"):
        open_videos(tmp_path, fold=0)


def test_a_class_without_videos_for_training_is_refused(tmp_path):
    write_videos(tmp_path)
    write_video(tmp_path / "up/a.mp4")
    fold = fold_of("a.mp4")
    with pytest.raises(ValueError, match=rf"fold {fold} of .* has all videos of up, .*: add videos .* another fold"):
        open_videos(tmp_path, fold=fold, size=16)
    train, test, _ = open_videos(tmp_path, fold=(fold + 1) % 5, size=16)
    assert len(train) + len(test) == 17


def test_too_many_frames_are_refused(folder, monkeypatch):
    monkeypatch.setattr(videos, "_MOST", 1000)
    with pytest.raises(ValueError, match=r"need more than 0 GiB of memory; give a smaller --size"):
        open_videos(folder, fold=0)


def test_without_pyav_torchcodec_decodes_and_without_both_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    with pytest.raises(ImportError, match=r"video files need PyAV: pip install av"):
        decode_video(tmp_path / "a.mp4")
    frames = torch.zeros(3, 3, 4, 4, dtype=torch.uint8)
    metadata = SimpleNamespace(rotation=None)

    class Decoder:
        def __init__(self, path):
            self.metadata = metadata if path.endswith("a.mp4") else path.missing

        def __getitem__(self, chosen):
            return frames[chosen]

    stand_in = SimpleNamespace(VideoDecoder=Decoder)
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", stand_in)
    monkeypatch.setitem(sys.modules, "torchcodec", SimpleNamespace(decoders=stand_in))
    (tmp_path / "a.mp4").write_bytes(b"\0\0\0\x20ftypisom")
    assert torch.equal(decode_video(tmp_path / "a.mp4"), frames)
    del metadata.rotation
    with pytest.raises(ImportError, match=r"torchcodec before 0\.11 does not turn"):
        decode_video(tmp_path / "a.mp4")
    (tmp_path / "a.mp4").write_bytes(b"#EXTM3U\nother.mp4\n")  # a playlist names other files
    with pytest.raises(ValueError, match=r"a\.mp4 .*does not begin like an MP4"):
        decode_video(tmp_path / "a.mp4")
