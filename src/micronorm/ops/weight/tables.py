"""What a launch over many weights must know on the device: a record per block of rows, and addresses.

Weights do not move, so their records are made once and kept. Outputs and gradients are new tensors in every call: their
addresses travel as numbers in a kernel's arguments. That needs no host memory that a CUDA graph would have to
keep alive, no pinned allocation while one is captured, and no synchronization.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

# A row of up to NARROW << k columns is a tile of that width, with as many rows as make TILE elements.
NARROW = 128
KINDS = 7
TILE = 4096
# Rows that do not begin at multiples of 16 elements: each element then has an address register of its own, and a larger
# tile would cost all the others their occupancy.
SHORT, SHORT_ROWS = 64, 16
LONG = 2048
"""Columns at a time of a row that no tile holds, or of a longer one that begins anywhere."""

RECORD = 8
"""Numbers per block: the address of its first row, fan-in, rows left in the weight, column of the statistics, offset of
the first row in its weight, kind of tile, index of the weight, and one to make 64 bytes."""


def tile_of(fan_in: int, *, aligned: bool) -> tuple[int, int]:
    """The kind of tile for rows of this length, and how many rows it takes."""
    if aligned and fan_in % 16 == 0:
        for kind in range(KINDS):
            if fan_in <= NARROW << kind:
                return kind, max(TILE // (NARROW << kind), 1)
    return (KINDS, SHORT_ROWS) if fan_in <= SHORT else (KINDS + 1, 1)


def block_records(weights: Sequence[Tensor], columns: Sequence[int]) -> Tensor:
    """B×RECORD numbers on the weights' device; `columns` says where each weight's statistics begin."""
    entries = []
    for index, (w, column) in enumerate(zip(weights, columns, strict=True)):
        address, fan_in = w.data_ptr(), w.numel() // w.shape[0]
        kind, rows = tile_of(fan_in, aligned=address % 16 == 0)
        entries.append([index, -(-w.shape[0] // rows), rows, address, fan_in, w.shape[0], column, kind])
    entries.sort(key=lambda entry: -entry[4])  # the longest rows first: no straggler begins when all others are done
    per_weight = _on_device(entries, weights[0].device).unbind(1)
    total = sum(entry[1] for entry in entries)
    device = per_weight[0].device
    place = torch.repeat_interleave(torch.arange(len(entries), device=device), per_weight[1], output_size=total)
    owner, blocks, rows, address, fan_in, height, column, kind = (numbers[place] for numbers in per_weight)
    row = (torch.arange(total, device=device) - (per_weight[1].cumsum(0) - per_weight[1])[place]) * rows
    at = row * fan_in
    fields = (address + at * weights[0].element_size(), fan_in, height - row, column + row, at, kind, owner, blocks)
    return torch.stack(fields, 1).to(weights[0].device)


def addresses_of(tensors: Sequence[Tensor]) -> Tensor:
    """The addresses of these tensors, on their device, written by a kernel that has them as arguments."""
    return _as_arguments([t.data_ptr() for t in tensors], tensors[0].device)


def lasting_addresses(tensors: Sequence[Tensor]) -> Tensor:
    """`addresses_of` for tensors that stay where they are: written once."""
    numbers = [t.data_ptr() for t in tensors]
    device = tensors[0].device
    return kept(("addresses", device, *numbers), lambda: _on_device(numbers, device).to(device))


def _on_device(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """These numbers; while a CUDA graph is captured on its device, else on the host to be copied when complete."""
    if not _capturing(device):
        return torch.tensor(numbers)
    table = torch.tensor(numbers)
    return _as_arguments(table.flatten().tolist(), device).reshape(table.shape)


def _as_arguments(numbers: Sequence[int], device: torch.device) -> Tensor:
    table = torch.zeros(len(numbers), dtype=torch.int64, device=device)
    torch._foreach_add_(table.unbind(), numbers)
    return table


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Kept:
    """Tables by what they were made from, the latest 256; those that a CUDA graph was captured with stay for good."""

    def __init__(self, limit: int = 256) -> None:
        self.tables: OrderedDict[Hashable, Tensor] = OrderedDict()
        self.in_graphs: dict[Hashable, Tensor] = {}
        self.limit = limit
        self.lock = threading.Lock()  # backward passes run in threads of autograd's

    def __call__(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        with self.lock:
            return self._find(key, make)

    def _find(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        found = self.in_graphs.get(key, self.tables.get(key))
        if found is None:
            found = make()
            if _capturing(found.device):
                return found  # it holds nothing before the graph's replay, and lives in the graph's memory
            self.tables[key] = found
            if len(self.tables) > self.limit:
                self.tables.popitem(last=False)
        elif key in self.tables:
            self.tables.move_to_end(key)
            if _capturing(found.device):
                self.in_graphs[key] = self.tables.pop(key)
        return found


kept = _Kept()
