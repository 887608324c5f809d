"""How right and how fast: what `python -m jaxnorm` runs, and what bench/ and the tuning of row programs measure with.

operations.py  the operations, with the plain JAX formula and the float64 reference of each
errors.py      errors of an operation against its reference
speed.py       times of an operation next to XLA's
summary.py     tables, plot and verdict of both
timer.py       clocks, and times of calls that take turns
display.py     terminal and plots: rich and matplotlib if installed, units, colours
"""
