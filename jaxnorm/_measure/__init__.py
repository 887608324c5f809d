"""How right and how fast: what `python -m jaxnorm` runs, and what bench/ and the tuning of row programs measure with.

errors      errors of an operation against its reference
speed       times of an operation next to XLA's
summary     tables, plot and verdict of both
timer       clocks, and times of calls that take turns
display     terminal and plots: rich and matplotlib if installed, units, colours
"""
