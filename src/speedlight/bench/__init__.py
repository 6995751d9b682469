"""``python -m speedlight.bench``: attention implementations timed side by side, behind a correctness gate.

    cases.py      the named problems                     gate.py      float64 check before any number
    interface.py  what a contender is                    timing.py    clocks, interleaving, host time, peak memory
    baselines.py  Speedlight, SDPA, eager, the list      measure.py   one case: gate, set up, measure
    peers.py      FlexAttention, FA3, FA4                record.py    JSONL rows and their environment
    report.py     tables and comparison                  chart.py     the chart      __main__.py  the command line

GPU numbers need care on a power-limited card: contenders alternate in one process, their order rotates, a pause lets
each start equally cool, every call meets a cold L2, and a spin kernel hides host time. Differences of a few per cent
between two separate runs mean nothing; ratios within one run do.
"""
