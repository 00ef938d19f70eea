import collections
import os
import pickle

import numpy as np
import pytest
import torch

from micronorm.data import pickles
from micronorm.data.pickles import read_pickle
from tests.data.miniature import python2_pickle

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)


class Brings:
    """A value whose pickle calls something."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_a_pickle_of_python_2_gives_its_arrays_and_lists():
    entries = read_pickle(python2_pickle(PIXELS, [3, 1, 4, 1], "labels"))
    assert torch.equal(entries["data"], torch.from_numpy(PIXELS))
    assert entries["labels"] == [3, 1, 4, 1]
    assert entries["batch_label"] == b"training batch 1 of 5"


def test_the_hand_written_program_is_what_python_itself_reads():
    # Else the miniatures would prove nothing of the official files.
    entries = pickle.loads(python2_pickle(PIXELS, [3, 1, 4, 1], "labels"), encoding="latin1")
    assert np.array_equal(entries["data"], PIXELS)
    assert entries["labels"] == [3, 1, 4, 1]


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_pickle_of_python_3_is_read_too(protocol):
    written = pickle.dumps({"data": PIXELS, "labels": [1, 2], "coarse": (None, True, 2.5)}, protocol=protocol)
    entries = read_pickle(written)
    assert torch.equal(entries["data"], torch.from_numpy(PIXELS))
    assert entries["coarse"] == (None, True, 2.5)


@pytest.mark.parametrize(
    "call, name",
    [
        ((os.mkdir, "planted"), "posix.mkdir"),
        ((eval, "open('planted', 'w')"), "__builtin__.eval"),
        ((getattr, "planted", "upper"), "__builtin__.getattr"),
        ((collections.OrderedDict,), "collections.OrderedDict"),
        ((np.fromfile, "planted"), "numpy.*fromfile"),
    ],
)
def test_what_a_file_brings_is_named_and_not_executed(call, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"names {name}, which no array needs; not executed"):
        read_pickle(pickle.dumps({"data": Brings(*call)}, protocol=2))
    assert list(tmp_path.iterdir()) == []


def test_a_file_can_write_nothing_into_the_reader():
    # BUILD sets attributes of whatever lies on the stack: here of the stand-in for numpy.dtype.
    program = b"\x80\x02cnumpy\ndtype\nN}(U\x08__call__Nu\x86b."
    with pytest.raises(ValueError, match="not a readable pickle"):
        read_pickle(program)
    assert torch.equal(read_pickle(python2_pickle(PIXELS, [0], "labels"))["data"], torch.from_numpy(PIXELS))


@pytest.mark.parametrize(
    "array", [PIXELS.astype(np.int64), np.asfortranarray(PIXELS), np.array([{}, []], dtype=object)]
)
def test_an_array_of_anything_but_bytes_in_c_order_is_refused(array):
    with pytest.raises(ValueError, match="array does not hold bytes in C order"):
        read_pickle(pickle.dumps({"data": array}, protocol=2))


def test_an_array_shorter_than_its_shape_is_refused():
    written = python2_pickle(PIXELS, [0], "labels").replace(b"J\x04\x00\x00\x00", b"J\x05\x00\x00\x00")
    with pytest.raises(ValueError, match=r"shape \(5, 3072\) comes with 12288 bytes"):
        read_pickle(written)


def test_an_array_that_was_never_filled_is_refused():
    program = b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87Rs."
    with pytest.raises(ValueError, match="not a readable pickle"):
        read_pickle(program)


def test_another_encoding_than_latin1_is_refused():
    program = b"\x80\x02}U\x04datac_codecs\nencode\nX\x01\x00\x00\x00aU\x05rot13\x86Rs."
    with pytest.raises(ValueError, match="names the encoding"):
        read_pickle(program)


@pytest.mark.parametrize("length", [0, 1, 100, 12_000])
def test_a_truncated_pickle_is_refused(length):
    with pytest.raises(ValueError, match="not a readable pickle"):
        read_pickle(python2_pickle(PIXELS, [0], "labels")[:length])


def test_a_pickle_of_something_else_is_refused():
    with pytest.raises(ValueError, match="holds a list, not a dictionary"):
        read_pickle(pickle.dumps([1, 2]))


def test_stand_ins_have_no_attributes_to_write():
    for stand_in in pickles._ADMITTED.values():
        assert not hasattr(stand_in, "__dict__")
