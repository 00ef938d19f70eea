"""Which part of the work a program gets, and how tensors lie in memory: plain integers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from micronorm.ops.bcn.triton import layout, plans, tiling
from micronorm.ops.packed import numbers_size
from tests.ops.bcn.layers import LAYOUTS, Case, layer_of, set_scheme

RULE = plans.rule(layout.Estimates.SHARED, 32, 1e-5, "identity", 0.01)
NORM = (RULE, layout.Affine.PER_GROUP, False)
PROCESSORS = st.sampled_from([2, 16, 132])


@st.composite
def shapes(draw):
    groups, size = draw(st.integers(1, 64)), draw(st.one_of(st.integers(1, 20), st.sampled_from([32, 48, 512])))
    space = draw(st.one_of(st.integers(1, 70), st.sampled_from([196, 3136, 12544, 50176, 1 << 20])))
    itemsize = draw(st.sampled_from([2, 4, 8]))
    return tiling.Shape(draw(st.integers(1, 300)), groups * size, space, groups, itemsize, draw(st.booleans()))


def is_power(n):
    return n > 0 and bin(n).count("1") == 1


@given(shapes(), PROCESSORS, st.sampled_from([tiling.REDUCE, tiling.ELEMENTWISE]))
def test_the_pieces_of_a_pass_cover_space_and_channels_once(shape, processors, kinds):
    tile = tiling.sweep(shape, processors, kinds=kinds)
    kind = kinds[shape.layout]
    assert is_power(tile.channels)
    assert is_power(tile.space)
    assert tile.channels * tile.space <= max(kind.tile, kind.run // shape.itemsize)
    assert tile.piece % tile.space == 0
    # every piece has something, and together they reach the end: exactly once
    assert (tile.pieces - 1) * tile.piece < shape.space <= tile.pieces * tile.piece
    assert (tile.blocks - 1) * tile.channels < shape.channels <= tile.blocks * tile.channels
    assert 1 <= tile.pieces <= tiling.MOST_PIECES
    assert tile.programs == shape.samples * tile.pieces * tile.blocks
    assert tile.cut == (tile.pieces, tile.piece, tile.blocks)


@given(shapes(), PROCESSORS, st.sampled_from([1, 2]))
def test_a_whole_tile_holds_whole_groups_and_all_of_their_space(shape, processors, tensors):
    tile = tiling.whole(shape, processors, tensors=tensors)
    if tile is None:
        return
    assert shape.bytes <= tiling.SMALL_BYTES
    assert is_power(tile.channels)
    assert is_power(tile.space)
    assert tile.channels * tile.space <= tiling.WHOLE_TILE
    assert shape.space <= tile.space < 2 * shape.space
    assert tile.groups * shape.size <= tile.channels < 2 * tile.groups * shape.size
    # several groups lie side by side only where a reshape can tell them apart
    assert tile.groups == 1 or tile.channels == tile.groups * shape.size
    blocks = -(-shape.groups // tile.groups)
    assert tile.programs == shape.samples * blocks
    assert (blocks - 1) * tile.groups < shape.groups
    assert is_power(tile.warps)


@given(shapes(), st.integers(1, 512))
def test_the_arithmetic_of_n_by_c_covers_every_group_once_and_fits(shape, pieces):
    tile = tiling.numbers(shape, pieces)
    assert is_power(tile.channels)
    assert tile.groups * shape.size <= tile.channels < 2 * tile.groups * shape.size
    assert tile.groups == 1 or tile.channels == tile.groups * shape.size
    assert tile.groups == 1 or tile.channels * tiling.next_power(pieces) <= tiling.NUMBERS_TILE
    blocks = -(-shape.groups // tile.groups)
    assert tile.programs == shape.samples * blocks
    assert (blocks - 1) * tile.groups < shape.groups


@given(st.integers(1, 1 << 40))
def test_next_power_is_the_least_one(n):
    power = tiling.next_power(n)
    assert is_power(power)
    assert power // 2 < n <= power
    assert tiling.is_power(n) == is_power(n)


@pytest.mark.parametrize("scheme, channels_last", [("split", True), ("pieces", True), ("pieces", False)])
def test_the_schemes_of_the_tests_cut_as_they_say(scheme, channels_last, monkeypatch):
    set_scheme(monkeypatch, scheme)
    shape = tiling.Shape(1, 6, 203, 2, 8, channels_last)
    assert tiling.whole(shape, 2, tensors=1) is None
    tile = tiling.sweep(shape, 132, kinds=tiling.REDUCE)
    if scheme == "pieces":
        assert tile.pieces > 1
        assert tile.pieces * tile.piece > shape.space  # the last one is shorter
        assert tile.piece > tile.space  # and a piece has several tiles


def test_few_programs_are_not_made_fewer_for_the_sake_of_full_rows():
    one, many = (tiling.Shape(n, 256, 196, 32, 2, channels_last=True) for n in (1, 64))
    found = tiling.whole(one, 132, tensors=2)
    assert found is not None
    assert (found.groups, found.programs) == (1, 32)
    found = tiling.whole(many, 132, tensors=2)
    assert found is not None
    assert found.channels * many.itemsize == 4 * tiling.SECTOR


def test_the_backward_of_a_larger_tensor_is_split_where_its_programs_would_fill_a_processor_each():
    wide, deep = tiling.Shape(64, 512, 196, 32, 2, channels_last=True), tiling.Shape(64, 2048, 49, 32, 2, True)
    assert tiling.whole(wide, 132, tensors=1) is not None
    assert tiling.whole(wide, 132, tensors=2) is None
    assert tiling.whole(deep, 132, tensors=2) is not None


@given(shapes(), PROCESSORS, st.sampled_from([1, 2]), st.booleans())
def test_two_passes_in_one_launch_have_whole_groups_full_rows_and_room(shape, processors, tensors, added):
    loads = tensors + added
    tile = tiling.twice(shape, processors, tensors=tensors, loads=loads)
    if tile is None:
        return
    assert is_power(tile.channels)
    assert is_power(tile.space)
    assert tile.channels == tile.groups * shape.size
    assert shape.channels % tile.channels == 0
    assert tile.programs == shape.samples * shape.channels // tile.channels >= processors * 15 // 16
    assert (tile.channels if shape.channels_last else tile.space) * shape.itemsize >= tiling.NARROW
    assert tile.stages > 1
    assert (tile.stages - 1) * tile.channels * tile.space * shape.itemsize * loads <= tiling.IN_FLIGHT


def test_which_tensors_are_read_twice_in_one_launch():
    def found(samples, channels, space, *, channels_last=True, itemsize=2):
        shape = tiling.Shape(samples, channels, space, 32, itemsize, channels_last)
        return tiling.twice(shape, 132, tensors=1, loads=1)

    assert found(64, 512, 784)
    assert found(64, 512, 784, channels_last=False)
    assert found(16, 256, 3136)
    assert found(64, 512, 784, itemsize=4)
    assert not found(64, 512, 784, itemsize=8)
    assert not found(2, 256, 67200)  # of few samples
    assert not found(64, 64, 12544)  # long ones, along channels
    assert not found(64, 2048, 49)  # short ones
    assert not found(64, 96, 3136)  # three channels a group
    assert not found(8, 64, 784)  # small ones


def test_tensors_that_lie_differently_are_not_read_twice():
    last, first = (512 * 784, 1, 512), (512 * 784, 784, 1)
    layer = plans.Layer(64, 512, 784, last, torch.float32, torch.device("cpu"), *NORM)
    assert plans.Forward(layer, last, last).tile.twice
    assert plans.Backward(layer, last, last, last, from_batch=False).tile.twice
    for tile in (
        plans.Forward(layer, first, last).tile,
        plans.Backward(layer, first, None, last, from_batch=False).tile,
        plans.Backward(layer, last, first, last, from_batch=False).tile,
        plans.Backward(layer, last, None, last, from_batch=True).tile,
    ):
        assert tile is None


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_sums_over_samples_take_them_in_few_rounds_and_a_tile_that_fits(samples, columns):
    rows, width = tiling.over_samples(samples, columns)
    assert is_power(rows)
    assert is_power(width)
    assert rows * width <= tiling.SAMPLES_TILE
    assert rows >= min(samples, 128)


def test_sums_are_cut_into_fewer_pieces_where_that_lets_the_next_pass_finish():
    shape = tiling.Shape(1, 64, 3136, 32, 2, channels_last=True)
    usual, fewer = tiling.sweep(shape, 132, kinds=tiling.REDUCE), tiling.reduction(shape, 132)
    assert fewer.pieces < usual.pieces
    assert fewer.piece * fewer.channels <= tiling.FINISH_PIECE
    assert tiling.finish(shape, 132, usual.pieces) is None
    assert tiling.finish(shape, 132, fewer.pieces) is not None
    long = tiling.Shape(1, 64, 67200, 32, 2, channels_last=True)  # its pieces would be too long
    wide = tiling.Shape(1, 4096, 196, 1, 2, channels_last=True)  # no pass finishes so wide a group
    for never in (long, wide):
        assert tiling.reduction(never, 132) == tiling.sweep(never, 132, kinds=tiling.REDUCE)


def test_sums_that_no_pass_finishes_are_cut_as_is_best_for_them():
    strides, shape = (64 * 3136, 1, 64), tiling.Shape(1, 64, 3136, 32, 2, channels_last=True)
    layer = plans.Layer(1, 64, 3136, strides, torch.bfloat16, torch.device("cpu"), *NORM)
    through_batch = plans.Backward(layer, strides, None, strides, from_batch=True)
    assert through_batch.finishing is None
    assert through_batch.sums == tiling.sweep(shape, 2, kinds=tiling.REDUCE)


def test_the_pass_that_finishes_covers_every_element_by_whole_groups(monkeypatch):
    set_scheme(monkeypatch, "finish")
    for channels_last in (True, False):
        for samples, channels, space, groups in ((1, 64, 3136, 32), (3, 24, 35, 3), (2, 4, 1, 4), (1, 12, 7, 6)):
            shape = tiling.Shape(samples, channels, space, groups, 2, channels_last)
            for pieces in (1, 3):
                tile = tiling.finish(shape, 132, pieces)
                assert tile is not None
                assert tile.channels % shape.size == 0
                assert (tile.blocks - 1) * tile.channels < channels <= tile.blocks * tile.channels
                assert (tile.pieces - 1) * tile.piece < space <= tile.pieces * tile.piece
                assert tile.piece % tile.space == 0
                assert tile.programs == samples * tile.pieces * tile.blocks


@pytest.mark.parametrize("groups, bytes", [(8, tiling.SMALL_BYTES + 1), (2, 1)], ids=["large", "groups of three"])
def test_no_pass_finishes_where_repeating_the_arithmetic_is_no_gain_or_groups_do_not_fill_a_tile(groups, bytes):
    shape = tiling.Shape(bytes, 6 if groups == 2 else 8, 1, groups, 1, channels_last=True)
    assert tiling.finish(shape, 132, 1) is None


# --- layout ----------------------------------------------------------------------------------------------------------


def view(x, strides):
    """x as the kernels see it."""
    return x.as_strided((*x.shape[:2], x[0, 0].numel()), strides)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [(2, 3), (2, 3, 5), (2, 3, 4, 5), (2, 3, 2, 4, 5), (2, 3, 1, 5), (1, 1, 1, 1)], ids=str
)
def test_what_the_kernels_read_is_what_lies_there(name, shape):
    if (name.startswith("channels_last") and len(shape) != (5 if "3d" in name else 4)) or (
        name == "turned" and len(shape) < 4
    ):
        return
    x = LAYOUTS[name](torch.randn(shape))
    read = layout.laid_out(x)
    strides = layout.strides_of(read)
    assert torch.equal(view(read, strides), x.flatten(2) if x.ndim > 2 else x.unsqueeze(-1))
    assert (layout.strides_of(x) is None) == (read.data_ptr() != x.data_ptr())
    y = layout.output_like(x)
    assert y.stride() == torch.empty_like(layout.source(x)).stride()
    assert y.shape == x.shape
    assert layout.strides_of(y) is not None
    assert y.untyped_storage().nbytes() == y.numel() * y.itemsize  # dense


def test_strides_that_cannot_be_one_axis_are_none_and_expanded_ones_are_read_in_place():
    x = torch.randn(2, 3, 4, 5)
    assert layout.strides_of(x) == (60, 20, 1)
    assert layout.strides_of(x.contiguous(memory_format=torch.channels_last)) == (60, 1, 3)
    assert layout.strides_of(x.transpose(2, 3)) is None
    assert layout.strides_of(x[..., ::2]) is None
    assert layout.strides_of(x[:, :, ::2, :1]) == (60, 20, 10)
    assert layout.strides_of(torch.ones(()).expand(2, 3, 4, 5)) == (0, 0, 0)
    assert layout.strides_of(torch.randn(2, 3)) == (3, 1, 1)


def test_an_input_whose_like_could_not_be_written_is_copied():
    x = torch.arange(99.0).as_strided((2, 4, 2, 2), (24, 3, 4, 2))  # a channel begins between the rows of another
    assert layout.strides_of(x) == (24, 3, 2)
    assert layout.strides_of(torch.empty_like(x)) is None
    copied = layout.source(x)
    assert torch.equal(copied, x)
    assert torch.empty_like(copied).stride() == layout.output_like(x).stride() == (16, 4, 2, 1)
    dense = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert layout.source(dense) is dense


def test_a_copy_lies_as_the_tensor_it_goes_with():
    like = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    turned = LAYOUTS["turned"](torch.randn(2, 3, 4, 5))
    copied = layout.laid_out(turned, like=like)
    assert torch.equal(copied, turned)
    assert copied.stride() == like.stride()
    assert layout.strides_of(copied) == (60, 1, 3)


def test_numbers_hold_five_blocks_two_estimates_a_flag_per_group_and_the_blend():
    norm = layer_of(Case((3, 6, 4), 2), "cpu")
    assert numbers_size(3, norm.num_channels, norm.num_groups) == 5 * 18 + 2 * 6 + 3 * 2 + 1


def test_a_part_of_a_tensor_too_large_for_32_bits_is_copied():
    near = torch.empty_strided((2, 3, 4), (2**40, 2**30 - 1, 1), device="meta")
    assert layout.strides_of(near) == (2**40, 2**30 - 1, 1)
    for shape, stride in (((2, 3, 4), (1, 2**30, 1)), ((2, 3, 3), (1, 1, 2**30))):
        far = torch.empty_strided(shape, stride, device="meta")
        assert layout.strides_of(far) is None
        for result in (layout.laid_out(far), layout.output_like(far)):
            assert result.shape == far.shape
            assert layout.strides_of(result) is not None
