"""Which part of the work a program gets: plain integers, so that every choice can be read and tested without a GPU.

Three schemes. *Whole*: a program holds some groups of one sample on chip and reads them once; one launch. *Twice*: a
program goes over its groups twice, the second time from the end, where the cache still holds what was read last; one
launch too. *Split*: space is cut into pieces; one kernel reduces every piece, a small one does the N×C arithmetic, and
an elementwise one goes over x again, from the end as well.

Whole is for tensors that take about as long to launch as to read. On larger ones its programs, which must load
everything before they can store anything, keep the memory less busy than two passes do. Twice needs as many groups as
there are processors; few large samples are for split. Measured on one H200, bf16, 64×512×28×28, forward: 59 µs whole,
49 split, 44 twice.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """What a choice depends on: the sizes, the bytes of an element, and whether channels are adjacent in memory."""

    samples: int
    channels: int
    space: int
    groups: int
    itemsize: int
    channels_last: bool

    @property
    def size(self) -> int:
        """Channels per group."""
        return self.channels // self.groups

    @property
    def layout(self) -> str:
        """What lies side by side in memory: channels, or long or short rows of space."""
        if self.channels_last:
            return "channels last"
        return "channels first" if self.space > 1024 else "short rows"

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return self.samples * self.channels * self.space * self.itemsize


class Whole(NamedTuple):
    """`groups` whole groups a program, as a tile of channels × space, both powers of two."""

    groups: int
    channels: int
    space: int
    programs: int
    warps: int

    @property
    def constants(self) -> dict[str, Any]:
        """What a kernel is compiled for."""
        return {"GROUPS": self.groups, "CHANNELS": self.channels, "SPACE": self.space}


class Twice(NamedTuple):
    """`groups` whole groups a program, by tiles of channels × space, both powers of two, along their space."""

    groups: int
    channels: int
    space: int
    programs: int
    warps: int
    stages: int

    @property
    def constants(self) -> dict[str, Any]:
        """What a kernel is compiled for."""
        tile = {"GROUPS": self.groups, "CHANNELS": self.channels, "SPACE": self.space}
        return tile | {"STAGES": self.stages}


class Numbers(NamedTuple):
    """The N×C arithmetic: `groups` whole groups a program, `channels` the power of two that holds them."""

    groups: int
    channels: int
    programs: int


class Pass(NamedTuple):
    """A pass over x in pieces of `piece` positions, by tiles of channels × space; `blocks` of channels."""

    channels: int
    space: int
    pieces: int
    piece: int
    blocks: int
    programs: int
    warps: int
    channels_last: bool
    stages: int

    @property
    def cut(self) -> tuple[int, int, int]:
        """How a kernel finds its place from the number of its program."""
        return self.pieces, self.piece, self.blocks

    @property
    def constants(self) -> dict[str, Any]:
        """What a kernel is compiled for."""
        tile = {"CHANNELS": self.channels, "SPACE": self.space, "CHANNELS_LAST": self.channels_last}
        return tile | {"STAGES": self.stages}


class PassKind(NamedTuple):
    """How a kind of pass likes its work.

    `tile`: elements of a tile; `run`: bytes of it that lie side by side in memory; `programs`: per processor, at most
    where space is cut for their sake; `warps` and `stages`: of a program and of its loop.
    """

    tile: int
    run: int
    programs: int
    warps: int
    stages: int = 1


# By `Shape.layout`. Measured on one H200, bf16, over the shapes of `micronorm bench`: a reduction along channels wants
# one wave of programs that keep several tiles on the way, one along space programs of one warp, and an elementwise pass
# many short programs.
REDUCE = {
    "channels last": PassKind(tile=2048, run=128, programs=5, warps=4, stages=4),
    "channels first": PassKind(tile=512, run=1024, programs=32, warps=1, stages=3),
    "short rows": PassKind(tile=1024, run=256, programs=32, warps=2, stages=3),
}
ELEMENTWISE = {
    "channels last": PassKind(tile=8192, run=256, programs=32, warps=8),
    "channels first": PassKind(tile=4096, run=8192, programs=32, warps=8),
    "short rows": PassKind(tile=4096, run=8192, programs=32, warps=8),
}
MOST_PIECES = 512


class TwiceKind(NamedTuple):
    """How a program that goes over its groups twice likes its work.

    `tile` and `run` as in `PassKind`, `run` at most; `programs`: per processor, at least.
    """

    tile: int
    run: int
    programs: int
    warps: int
    stages: int


# Along channels, for one tensor (forward) and two (backward), by the longest space. Measured as above.
TWICE = {
    1: {256: TwiceKind(2048, 128, 2, 2, 3), 1024: TwiceKind(4096, 256, 2, 4, 4), 4096: TwiceKind(8192, 128, 2, 8, 5)},
    2: {256: TwiceKind(2048, 256, 2, 4, 4), 1024: TwiceKind(4096, 256, 2, 4, 4), 4096: TwiceKind(4096, 256, 2, 4, 4)},
}
# Where that would be narrow: one program a processor, with as much on the way from memory as two have elsewhere.
TWICE_ALONE = TwiceKind(4096, 128, 1, 8, 6)
# Along space, by the most elements of a group.
TWICE_ALONG_SPACE = {16384: TwiceKind(2048, 2048, 2, 4, 3), 1 << 31: TwiceKind(4096, 4096, 2, 8, 6)}
TWICE_BYTES = 5 << 20  # of the smallest tensor it is for, along channels; along space the whole scheme is as fast
NARROW = 64  # fewer bytes side by side are read too slowly
ON_THE_WAY = 96 << 10  # bytes a program may have on the way from memory: processors have room for that

# Elements of a tile that fit on chip beside what else a program holds; up to what size programs with two tensors there
# are many enough on a processor to keep it busy; and up to what size reading parts of sectors costs less than a launch.
WHOLE_TILE = 16384
SMALL_TILE = 8192
THIN_TILE = 4096
# Tensors up to this size are launched more than they are read.
SMALL_BYTES = 16 << 20
SECTOR = 32  # bytes of memory that travel together
NUMBERS_TILE = 8192
SAMPLES_TILE = 2048
# Of `finish`, channels last: sums of pieces that each of its programs reads, and elements of a piece. Measured on one
# H200: 2×256×50×84, forward, takes 14.9 µs with 44 pieces, 7.9 with 15, 8.6 with 8, and 12.9 with 66 and no finish.
FINISH_TILE = 2048
FINISH_PIECE = 32768


def next_power(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def is_power(n: int) -> bool:
    """Whether n is a power of two."""
    return n & (n - 1) == 0


def whole(shape: Shape, processors: int, *, tensors: int) -> Whole | None:
    """The tile of the whole scheme, or None where the split one is better or a group does not fit on chip.

    `tensors` are held there at once: one in the forward, two in the backward. A thread has 128 of their elements, half
    as many where processors would be idle: the fewer warps share a sum, the less they wait for each other.
    """
    space, size = next_power(shape.space), shape.size
    if shape.bytes > SMALL_BYTES or next_power(size) * space > WHOLE_TILE:
        return None
    groups = 1
    if is_power(size):
        # More groups a program while tiles are small and processors busy, or while rows of a tile are parts of sectors.
        while groups < shape.groups and 2 * groups * size * space <= WHOLE_TILE:
            narrow = shape.channels_last and groups * size * shape.itemsize < 4 * SECTOR
            programs = shape.samples * -(-shape.groups // (2 * groups))
            enough = 4096 if shape.channels_last else 2048
            if programs < (processors // 2 if narrow else 2 * processors):
                break
            if not narrow and groups * size * space >= enough:
                break
            groups *= 2
    width = groups * size
    tile = next_power(width) * space
    programs = shape.samples * -(-shape.groups // groups)
    if shape.channels_last:
        thin = width * shape.itemsize < SECTOR and width < shape.channels
        if thin and (programs >= processors or tile > THIN_TILE):
            return None
        if tensors > 1 and tile > SMALL_TILE and shape.bytes > SMALL_BYTES // 2:
            return None
    share = (128 if programs >= processors else 64) // tensors
    warps = max(1, min(8, next_power(tile // (32 * share))))
    return Whole(groups, next_power(width), space, programs, warps)


def twice(shape: Shape, processors: int, *, tensors: int, loads: int) -> Twice | None:
    """The tile of the scheme of two passes in one launch, or None where another is better.

    `tensors` as in `whole`; `loads` is how many a pass reads at once, at most.
    """
    if shape.bytes <= (TWICE_BYTES if shape.channels_last else SMALL_BYTES) or shape.itemsize > 4:
        return None
    if shape.channels_last:
        kinds = [kind for longest, kind in TWICE[tensors].items() if shape.space <= longest][:1]
        kinds += [TWICE_ALONE] if kinds else []
    else:
        kinds = [kind for most, kind in TWICE_ALONG_SPACE.items() if shape.size * shape.space <= most][:1]
    tiles = (_twice(shape, processors, kind, loads) for kind in kinds)
    return next((tile for tile in tiles if tile is not None), None)


def _twice(shape: Shape, processors: int, kind: TwiceKind, loads: int) -> Twice | None:
    """The widest tile of this kind that leaves every processor its programs, or nearly."""
    enough = kind.programs * processors * 15 // 16
    width = kind.run // shape.itemsize if shape.channels_last else shape.size
    while width > shape.size and (shape.channels % width or shape.samples * shape.channels // width < enough):
        width //= 2
    space, programs = kind.tile // width, shape.samples * shape.channels // width
    beside = (width if shape.channels_last else space) * shape.itemsize
    fits = is_power(width) and width % shape.size == 0 and shape.channels % width == 0
    if not fits or programs < enough or beside < NARROW or shape.space <= 4 * space:
        return None
    stages = min(kind.stages, 1 + ON_THE_WAY // (loads * kind.tile * shape.itemsize))
    return Twice(width // shape.size, width, space, programs, kind.warps, stages)


def in_one_launch(shape: Shape, processors: int, *, tensors: int, loads: int, alike: bool) -> Twice | Whole | None:
    """The tile of a whole forward or backward in one launch, or None where it is split.

    Tensors are `alike` where the same lies side by side in all: others would be turned around on chip, beside what is
    on the way from memory, for which there is no room.
    """
    tile = twice(shape, processors, tensors=tensors, loads=loads) if alike else None
    return tile or whole(shape, processors, tensors=tensors)


def numbers(shape: Shape, pieces: int) -> Numbers:
    """Whole groups of some channels a program, few enough for their pieces to fit beside them."""
    size, groups = shape.size, 1
    if is_power(size):
        while groups < shape.groups and 2 * groups * size * next_power(pieces) <= NUMBERS_TILE and groups * size < 128:
            groups *= 2
    return Numbers(groups, next_power(groups * size), shape.samples * -(-shape.groups // groups))


def over_samples(samples: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a tile of sums over samples: all samples at once up to 128, for loops wait for the memory."""
    rows = min(next_power(samples), 128)
    return rows, min(next_power(columns), SAMPLES_TILE // rows, 64)


def finishing_width(shape: Shape) -> int | None:
    """The channels of a tile of `finish`; None where its arithmetic would be repeated too often."""
    if shape.bytes > SMALL_BYTES or not is_power(shape.size):
        return None
    run = ELEMENTWISE[shape.layout].run // shape.itemsize
    width = shape.size if not shape.channels_last else max(shape.size, run)
    return min(width, next_power(shape.channels))


def reduction(shape: Shape, processors: int) -> Pass:
    """The pass of sums: in few enough pieces for `finish` to do the rest, where none gets too long for that."""
    best = sweep(shape, processors, kinds=REDUCE)
    width = finishing_width(shape)
    if width is None or width > FINISH_TILE or not shape.channels_last:
        return best
    most = max(1, min(FINISH_TILE // width, 2 * processors // (shape.samples * best.blocks)))
    if best.pieces <= most:
        return best
    fewer = sweep(shape, processors, kinds=REDUCE, most=most)
    return fewer if fewer.piece * fewer.channels <= FINISH_PIECE else best


def finish(shape: Shape, processors: int, pieces: int) -> Pass | None:
    """The elementwise pass by tiles of whole groups, whose programs do the N×C arithmetic themselves; None where not.

    It spares a launch, and every program repeats that arithmetic: for small tensors, with few pieces a channel.
    """
    width = finishing_width(shape)
    if width is None or width * next_power(pieces) > (FINISH_TILE if shape.channels_last else NUMBERS_TILE):
        return None
    kind = ELEMENTWISE[shape.layout]
    tile = max(1024, min(kind.tile, next_power(shape.samples * shape.channels * shape.space // (2 * processors))))
    space = min(next_power(shape.space), max(tile // width, 1))
    blocks, tiles = -(-shape.channels // width), -(-shape.space // space)
    cut = max(1, min(tiles, 4 * processors // (shape.samples * blocks)))
    per_piece = -(-tiles // cut)
    cut = -(-tiles // per_piece)
    programs = shape.samples * cut * blocks
    return Pass(width, space, cut, per_piece * space, blocks, programs, 4, shape.channels_last, 1)


def sweep(shape: Shape, processors: int, *, kinds: Mapping[str, PassKind], most: int | None = None) -> Pass:
    """Tiles along the memory, and pieces, at most `most`, so that every processor has some programs."""
    kind = kinds[shape.layout]
    # Smaller tiles rather than idle processors.
    while kind.tile > 1024 and shape.samples * shape.channels * shape.space < kind.tile * processors:
        kind = kind._replace(tile=kind.tile // 2, warps=max(kind.warps // 2, 4))
    along, across = (shape.channels, shape.space) if shape.channels_last else (shape.space, shape.channels)
    along = min(next_power(along), kind.run // shape.itemsize)
    across = min(next_power(across), max(kind.tile // along, 1))
    channels, space = (along, across) if shape.channels_last else (across, along)
    blocks = -(-shape.channels // channels)
    tiles = -(-shape.space // space)
    wanted = processors * kind.programs // (shape.samples * blocks)
    pieces = max(1, min(tiles, wanted, most or MOST_PIECES))
    per_piece = -(-tiles // pieces)
    pieces = -(-tiles // per_piece)
    return Pass(
        channels,
        space,
        pieces,
        per_piece * space,
        blocks,
        shape.samples * pieces * blocks,
        kind.warps,
        shape.channels_last,
        kind.stages,
    )
