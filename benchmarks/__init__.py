"""One module per table: `python -m benchmarks.NAME [--peers ...] [--out FILE]`, then `python -m benchmarks.check`."""
