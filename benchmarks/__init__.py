"""One module per table: `python -m benchmarks.NAME [--peers ...] [--out FILE]`. `python -m benchmarks.check` lists missed targets."""
