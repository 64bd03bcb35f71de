"""What the product is measured by: scripts that write their results into docs/performance.md.

make bench                              all of them
python -m benchmarks.training --help    one of them
"""
