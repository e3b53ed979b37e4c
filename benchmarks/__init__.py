"""One module per table: `python -m benchmarks.NAME [--only WORD] [--peers ...] [--out FILE]`, all by `python -m benchmarks --all
--out DIR`; then `python -m benchmarks.check`."""
