"""Norm + ReLU, forward and backward: our layer beside what one would run instead. `micronorm bench` drives it.

| file | holds |
|---|---|
| `cases.py` | the shapes, each with its reason, and the layouts |
| `peers.py` | the contestants |
| `correct.py` | the comparison with the plain equations in float64, without which there is no figure |
| `timing.py` | clocks of host and device, captured graphs, the copy bandwidth |
| `measure.py` | all contestants at one shape |
| `rows.py` | what a figure is compared with: BatchNorm's best, the floor of memory traffic; CSV |
| `table.py` | the tables as text, and what they say of the targets |
| `plot.py` | the tables as plots |
"""
