"""Timing of norm + ReLU, forward and backward: our layer beside PyTorch's own. `micronorm bench` runs it.

`timing` and `results` also serve the scripts in `benchmarks/`, which time whole training steps. This room has no models
and no training loops.

| file | holds |
|---|---|
| `cases.py` | the shapes to measure, each with its reason, the memory layouts, and the layers that are compared |
| `timing.py` | clocks of host and device, captured graphs, copy bandwidth |
| `measure.py` | all methods at one shape; a layer that differs from the plain equations in float64 gets no time |
| `results.py` | ratios to BatchNorm, tables, CSV files, and where figures come from |
"""
