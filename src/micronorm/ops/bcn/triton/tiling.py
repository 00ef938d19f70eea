"""The choice of tiles: which part of the work each program gets. Plain integers, which can be tested without a GPU.

There are three schemes. *Whole*: a program holds some groups of one sample on chip and reads them once; one launch.
*Twice*: a program reads its groups twice, the second time from the end, which is still in the cache; one launch.
*Split*: space is cut into pieces; one kernel reduces every piece, a small one does the N×C arithmetic, and an
elementwise one reads x again, from the end as well.

Whole is for tensors that take about as long to launch as to read. On larger ones its programs must load everything
before they can store anything, which uses less of the memory bandwidth than two passes do. Twice needs as many groups
as there are processors; split is for few large samples. Measured on one H200, bf16, 64×512×28×28, forward: 59 µs whole,
49 split, 44 twice.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """The sizes, the bytes of an element, and whether channels are adjacent in memory: what a choice depends on."""

    samples: int
    channels: int
    space: int
    groups: int
    itemsize: int
    channels_last: bool

    @property
    def size(self) -> int:
        """Return the channels per group."""
        return self.channels // self.groups

    @property
    def layout(self) -> str:
        """Return what is adjacent in memory: channels, or long or short rows of space."""
        if self.channels_last:
            return "channels last"
        return "channels first" if self.space > 1024 else "short rows"

    @property
    def bytes(self) -> int:
        """Return the size of the whole tensor."""
        return self.samples * self.channels * self.space * self.itemsize


class Whole(NamedTuple):
    """A launch in which a program takes `groups` whole groups, by tiles of channels × space, both powers of two.

    One tile holds all of the groups' space, or with `twice` the program reads them twice, tile by tile. The N×C
    arithmetic has tiles of one position.
    """

    groups: int
    channels: int
    space: int
    programs: int
    warps: int
    stages: int = 1
    twice: bool = False

    @property
    def constants(self) -> dict[str, Any]:
        """Return the constants that a kernel is compiled for."""
        tile = {"GROUPS": self.groups, "CHANNELS": self.channels, "SPACE": self.space}
        return tile | {"STAGES": self.stages, "TWICE": self.twice}


class Pass(NamedTuple):
    """A pass over x in `pieces` of `piece` positions and `blocks` of channels, by tiles of channels × space."""

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
        """Return the numbers from which a program finds its place."""
        return self.pieces, self.piece, self.blocks

    @property
    def constants(self) -> dict[str, Any]:
        """Return the constants that a kernel is compiled for."""
        tile = {"CHANNELS": self.channels, "SPACE": self.space, "CHANNELS_LAST": self.channels_last}
        return tile | {"STAGES": self.stages}


class PassKind(NamedTuple):
    """Tile sizes and warp counts for a kind of pass.

    Args:
        tile: elements of a tile.
        run: bytes of a tile that are adjacent in memory.
        programs: programs per processor, at most, if space is cut to have more of them.
        warps: warps of a program.
        stages: pipeline stages of a program's loop.
    """

    tile: int
    run: int
    programs: int
    warps: int
    stages: int = 1


# By `Shape.layout`. Measured on one H200, bf16, over the shapes of `micronorm bench`. Best were: for a reduction along
# channels, one wave of programs that keep several loads in flight; along space, programs of one warp; for an
# elementwise pass, many short programs.
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

# Tile sizes and warp counts for kernels that read each group twice. Here `run` is the most bytes, and `programs` the
# fewest programs per processor. Measured as above.
# Along channels, for one tensor (forward) and two (backward), by the largest space.
TWICE = {
    1: {256: PassKind(2048, 128, 2, 2, 3), 1024: PassKind(4096, 256, 2, 4, 4), 4096: PassKind(8192, 128, 2, 8, 5)},
    2: {256: PassKind(2048, 256, 2, 4, 4), 1024: PassKind(4096, 256, 2, 4, 4), 4096: PassKind(4096, 256, 2, 4, 4)},
}
# If those tiles would be too narrow: one program per processor, with as many loads in flight as two have elsewhere.
TWICE_ALONE = PassKind(4096, 128, 1, 8, 6)
# Along space, by the most elements of a group.
TWICE_ALONG_SPACE = {16384: PassKind(2048, 2048, 2, 4, 3), 1 << 31: PassKind(4096, 4096, 2, 8, 6)}
TWICE_BYTES = 5 << 20  # smaller tensors use another scheme, along channels; along space whole is as fast as twice
NARROW = 64  # fewer adjacent bytes are read too slowly
IN_FLIGHT = 96 << 10  # bytes that a program may be loading at once: a processor has room for that

# Elements of a tile: the most that fit on chip beside a program's other data; the most for two tensors, so that enough
# programs share a processor to keep it busy; and the most for which reading parts of sectors costs less than a launch.
WHOLE_TILE = 16384
SMALL_TILE = 8192
THIN_TILE = 4096
# Up to this size, the launch of a tensor takes longer than reading it.
SMALL_BYTES = 16 << 20
SECTOR = 32  # bytes that are loaded together
NUMBERS_TILE = 8192
SAMPLES_TILE = 2048
# For the kernels of estimates.py: elements of a tile, channels of a tile if there are several programs, and the most
# channels of a single program. A processor executes one instruction of a warp at a time, so that a single program takes
# as long as it has instructions: more than twice as many for 64 channels as for 16.
ESTIMATES_TILE = 2048
ESTIMATES_WIDTH = 8
SCANNED_ALONE = 16
POOLED_ALONE = 32
# For `finish`, channels last: the most sums of pieces that each program reads, and the most elements of a piece.
# Measured on one H200: 2×256×50×84, forward, takes 14.9 µs with 44 pieces, 7.9 with 15, 8.6 with 8, and 12.9 with 66
# and no finish.
FINISH_TILE = 2048
FINISH_PIECE = 32768


def next_power(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def is_power(n: int) -> bool:
    """Return whether n is a power of two."""
    return n & (n - 1) == 0


def whole(shape: Shape, processors: int, *, tensors: int) -> Whole | None:
    """Return the tile of the whole scheme, or None if the split scheme is better or a group does not fit on chip.

    `tensors` is how many are held on chip: one in the forward, two in the backward. A thread has 128 of their elements,
    or half as many if processors would be idle: the fewer warps share a sum, the less they wait for each other.
    """
    space, size = next_power(shape.space), shape.size
    if shape.bytes > SMALL_BYTES or next_power(size) * space > WHOLE_TILE:
        return None
    groups = 1
    if is_power(size):
        # More groups per program while tiles are small and processors busy, or while rows are parts of sectors.
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


def twice(shape: Shape, processors: int, *, tensors: int, loads: int) -> Whole | None:
    """Return the tile of the scheme that reads groups twice in one launch, or None if another scheme is better.

    `tensors` as in `whole`; `loads` is how many tensors a pass reads at once, at most.
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


def _twice(shape: Shape, processors: int, kind: PassKind, loads: int) -> Whole | None:
    """Return the widest tile of this kind that leaves (nearly) enough programs for every processor, or None."""
    enough = kind.programs * processors * 15 // 16
    width = kind.run // shape.itemsize if shape.channels_last else shape.size
    while width > shape.size and (shape.channels % width or shape.samples * shape.channels // width < enough):
        width //= 2
    space, programs = kind.tile // width, shape.samples * shape.channels // width
    beside = (width if shape.channels_last else space) * shape.itemsize
    fits = is_power(width) and width % shape.size == 0 and shape.channels % width == 0
    if not fits or programs < enough or beside < NARROW or shape.space <= 4 * space:
        return None
    stages = min(kind.stages, 1 + IN_FLIGHT // (loads * kind.tile * shape.itemsize))
    return Whole(width // shape.size, width, space, programs, kind.warps, stages, twice=True)


def in_one_launch(shape: Shape, processors: int, *, tensors: int, loads: int, alike: bool) -> Whole | None:
    """Return the tile of a forward or backward in one launch, or None if it is split.

    `alike` says whether the same axis is adjacent in memory in all tensors. Otherwise they would be transposed on chip,
    for which there is no room beside the loads in flight.
    """
    tile = twice(shape, processors, tensors=tensors, loads=loads) if alike else None
    return tile or whole(shape, processors, tensors=tensors)


def numbers(shape: Shape, pieces: int) -> Whole:
    """Return the tile of the N×C arithmetic: whole groups, few enough for the sums of their pieces to fit."""
    size, groups = shape.size, 1
    if is_power(size):
        while groups < shape.groups and 2 * groups * size * next_power(pieces) <= NUMBERS_TILE and groups * size < 128:
            groups *= 2
    return Whole(groups, next_power(groups * size), 1, shape.samples * -(-shape.groups // groups), warps=4)


def over_samples(samples: int, columns: int) -> tuple[int, int]:
    """Return rows and columns of a tile of sums over samples: up to 128 samples at once, because loops are slow."""
    rows = min(next_power(samples), 128)
    return rows, min(next_power(columns), SAMPLES_TILE // rows, 64)


def over_estimates(rows: int, channels: int, *, scans: bool) -> tuple[int, int]:
    """Return rows and channels of a tile of samples, or micro-batches, for the kernels of estimates.py.

    One program takes all of a few channels, which saves launches; fewer of them if it runs Algorithm 1, which takes it
    longer. Otherwise tiles are narrow, to have more programs.
    """
    alone = channels <= (SCANNED_ALONE if scans else POOLED_ALONE)
    width = next_power(channels) if alone else ESTIMATES_WIDTH
    return max(2, min(next_power(rows), ESTIMATES_TILE // width)), width


def finishing_width(shape: Shape) -> int | None:
    """Return the channels of a tile of `finish`, or None if its arithmetic would be repeated too often."""
    if shape.bytes > SMALL_BYTES or not is_power(shape.size):
        return None
    run = ELEMENTWISE[shape.layout].run // shape.itemsize
    width = shape.size if not shape.channels_last else max(shape.size, run)
    return min(width, next_power(shape.channels))


def reduction(shape: Shape, processors: int) -> Pass:
    """Return the pass of sums, in few enough pieces for `finish` if the pieces do not get too long for that."""
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
    """Return the elementwise pass whose programs do the N×C arithmetic of their own groups, or None if it is slower.

    It saves a launch, but every program repeats the arithmetic: it is for small tensors with few pieces per channel.
    """
    width = finishing_width(shape)
    if width is None or width * next_power(pieces) > (FINISH_TILE if shape.channels_last else NUMBERS_TILE):
        return None
    kind = ELEMENTWISE[shape.layout]
    tile = max(1024, min(kind.tile, next_power(shape.samples * shape.channels * shape.space // (2 * processors))))
    space = min(next_power(shape.space), max(tile // width, 1))
    return _cut(shape, width, space, programs=4 * processors, warps=4)


def sweep(shape: Shape, processors: int, *, kinds: Mapping[str, PassKind], most: int | None = None) -> Pass:
    """Return a pass with tiles along the memory, and pieces (at most `most`) so that every processor has programs."""
    kind = kinds[shape.layout]
    # Smaller tiles are better than idle processors.
    while kind.tile > 1024 and shape.samples * shape.channels * shape.space < kind.tile * processors:
        kind = kind._replace(tile=kind.tile // 2, warps=max(kind.warps // 2, 4))
    along, across = (shape.channels, shape.space) if shape.channels_last else (shape.space, shape.channels)
    along = min(next_power(along), kind.run // shape.itemsize)
    across = min(next_power(across), max(kind.tile // along, 1))
    channels, space = (along, across) if shape.channels_last else (across, along)
    programs, most = processors * kind.programs, most or MOST_PIECES
    return _cut(shape, channels, space, programs=programs, most=most, warps=kind.warps, stages=kind.stages)


def _cut(
    shape: Shape, channels: int, space: int, *, programs: int, most: int | None = None, warps: int, stages: int = 1
) -> Pass:
    """Return a pass by these tiles, in as many pieces of space (at most `most`) as give up to so many programs."""
    blocks, tiles = -(-shape.channels // channels), -(-shape.space // space)
    pieces = max(1, min(tiles, programs // (shape.samples * blocks), most or tiles))
    per_piece = -(-tiles // pieces)
    pieces = -(-tiles // per_piece)
    count = shape.samples * pieces * blocks
    return Pass(channels, space, pieces, per_piece * space, blocks, count, warps, shape.channels_last, stages)
