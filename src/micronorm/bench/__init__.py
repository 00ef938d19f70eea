"""Timing of norm + ReLU, forward and backward: our layer beside PyTorch's own. `micronorm bench` runs it.

`timing` and `results` also serve the scripts in `benchmarks/`, which time whole training steps. Models and training
loops do not live here.

| file | holds |
|---|---|
| `cases.py` | the shapes to measure, each with its reason, and the memory layouts |
| `methods.py` | the layers that are compared |
| `accuracy.py` | the comparison with the plain equations in float64; a wrong layer gets no time |
| `timing.py` | clocks of host and device, captured graphs, copy bandwidth |
| `measure.py` | all methods at one shape |
| `results.py` | ratios to BatchNorm, tables, CSV files, and where figures come from |
"""
