"""Dense products of any shape, dealt in even shares (Stream-K, arXiv 2301.03598)."""

from evenshare._lazy import attach

__getattr__, __all__ = attach(__name__, {"grouped_matmul": "grouped", "matmul": "functions", "scaled_matmul": "scaled"})
