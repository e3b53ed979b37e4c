"""One module per table: `python -m benchmarks.NAME [--only WORD] [--peers ...] [--out FILE]`, then `python -m benchmarks.check`."""
