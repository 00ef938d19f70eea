"""The tables on the device for a launch over many weights: a record per block of rows, and addresses.

Weights do not move, so their records are made once and kept. Outputs and gradients are new tensors in every call; their
addresses are passed as arguments of a kernel that writes them to a table. A CUDA graph then needs no host memory to
stay alive and no pinned allocation, and nothing waits for the device.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from micronorm.ops.packed import Record
from micronorm.ops.private_api import foreach_add_
from micronorm.ops.runtime import capturing

# A tile of kind k has NARROW << k columns, for rows of up to that length, and as many rows as make TILE elements.
NARROW = 128
KINDS = 7
TILE = 4096
# The tile for rows that do not begin at multiples of 16 elements. Each of their elements has its own address register,
# so a larger tile would reduce the occupancy of the whole kernel.
SHORT, SHORT_ROWS = 64, 16
LONG = 2048
"""Columns that are processed at a time of a row that does not fit a tile."""


def tile_of(fan_in: int, *, aligned: bool) -> tuple[int, int]:
    """Return the kind of tile for rows of this length, and its number of rows."""
    if aligned and fan_in % 16 == 0:
        for kind in range(KINDS):
            if fan_in <= NARROW << kind:
                return kind, max(TILE // (NARROW << kind), 1)
    return (KINDS, SHORT_ROWS) if fan_in <= SHORT else (KINDS + 1, 1)


def block_records(weights: Sequence[Tensor], columns: Sequence[int]) -> Tensor:
    """Return B `packed.Record` rows on the weights' device; `columns` says where each weight's statistics begin."""
    entries = []
    for index, (w, column) in enumerate(zip(weights, columns, strict=True)):
        address, fan_in = w.data_ptr(), w.numel() // w.shape[0]
        kind, rows = tile_of(fan_in, aligned=address % 16 == 0)
        entries.append([index, -(-w.shape[0] // rows), rows, address, fan_in, w.shape[0], column, kind])
    entries.sort(key=lambda entry: -entry[4])  # the longest rows first, so that no long row starts last
    per_weight = _on_device(entries, weights[0].device).unbind(1)
    total = sum(entry[1] for entry in entries)
    device = per_weight[0].device
    place = torch.repeat_interleave(torch.arange(len(entries), device=device), per_weight[1], output_size=total)
    owner, blocks, rows, address, fan_in, height, column, kind = (numbers[place] for numbers in per_weight)
    row = (torch.arange(total, device=device) - (per_weight[1].cumsum(0) - per_weight[1])[place]) * rows
    at = row * fan_in
    fields = {
        Record.ADDRESS: address + at * weights[0].element_size(),
        Record.FAN_IN: fan_in,
        Record.ROWS: height - row,
        Record.COLUMN: column + row,
        Record.OFFSET: at,
        Record.KIND: kind,
        Record.OWNER: owner,
        Record.PADDING: blocks,
    }
    return torch.stack([fields[field] for field in Record], 1).to(weights[0].device)


def addresses_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the addresses of tensors as a table on their device."""
    return _as_arguments([t.data_ptr() for t in tensors], tensors[0].device)


def lasting_addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Return `addresses_of` for tensors that never move: the table is made once."""
    numbers = [t.data_ptr() for t in tensors]
    device = tensors[0].device
    return kept(("addresses", device, *numbers), lambda: _on_device(numbers, device).to(device))


def _on_device(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return a table of numbers: on the device while a CUDA graph is captured, else on the host."""
    table = torch.tensor(numbers)
    if not capturing(device):
        return table
    return _as_arguments(table.flatten().tolist(), device).reshape(table.shape)


def _as_arguments(numbers: Sequence[int], device: torch.device) -> Tensor:
    table = torch.zeros(len(numbers), dtype=torch.int64, device=device)
    foreach_add_(table.unbind(), numbers)  # passes the numbers as arguments of a kernel
    return table


class _Kept:
    """A cache of the tables used last; tables that a CUDA graph was captured with are kept forever."""

    def __init__(self, limit: int = 256) -> None:
        self.tables: OrderedDict[Hashable, Tensor] = OrderedDict()
        self.in_graphs: dict[Hashable, Tensor] = {}
        self.limit = limit
        self.lock = threading.Lock()  # autograd runs backward passes in its own threads

    def __call__(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        with self.lock:
            return self._find(key, make)

    def _find(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        found = self.in_graphs.get(key, self.tables.get(key))
        if found is None:
            found = make()
            if capturing(found.device):
                return found  # it belongs to the graph's memory and is filled at the replay only
            self.tables[key] = found
            if len(self.tables) > self.limit:
                self.tables.popitem(last=False)
        elif key in self.tables:
            self.tables.move_to_end(key)
            if capturing(found.device):
                self.in_graphs[key] = self.tables.pop(key)
        return found


kept = _Kept()
